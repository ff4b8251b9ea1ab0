"""Keys of other systems are stated once: what a rule writes for a run, the same rule reads as the same settings."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from configurations import CORPUS, Outcome
from meshwright.engines.written import decided, values_of
from meshwright.imports.claims import Has, NoEffect
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import FACTS, cases, sets, whole, write
from meshwright.imports.systems import ARGUMENT_FLAGS, FLAGS, NANOGPT, SYSTEMS
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn: 96, vocab: 300, max_positions: 64}
data: {sources: a.txt, sequence_length: 32, tokenizer: ./base}
training: {steps: 50, global_batch: 16, micro_batch: 2}
run_dir: runs/mine
"""
RUNS = (
    [],
    [
        *("training.precision=bf16", "training.clip=null", "training.compile=true", "training.deterministic=true"),
        *("training.recompute=full", "training.lr_schedule={name: linear, warmup: 7, final: 0.25}", "trackers=[wandb]"),
        *("layout={dp_shard: 4, zero: 3, cp: 2}", "training.optimizer={lr: 2e-4, betas: [0.8, 0.9], eps: 1e-6}"),
        *("data.order=given", "data.packing=best_fit", "data.separate_documents=true", "checkpoint.every=25"),
    ],
    [
        *("model.tied_embeddings=true", "training.lr_schedule={name: constant, warmup: 0}", "layout={pp: 2}"),
        *("training.precision=fp16", "trackers=[tensorboard]", "training.evaluation={every: 5, batches: 3}"),
        *(
            "finetune={method: lora, rank: 4, alpha: 8, dropout: 0.1, dora: true, train: [tok_embeddings]}",
            "training.seed=7",
        ),
        *("data.chat.train_on=last", "data.held_out=0.25", "checkpoint.keep_last=4"),
    ],
)
TABLES = {system.name: system.rules for system in (*SYSTEMS, FLAGS, NANOGPT) if system.rules}
TABLES["TrainingArguments as flags"] = ARGUMENT_FLAGS.rules
LEAST = 19
"""Keys that each system has with an inverse."""


def resolved(overrides: list[str]) -> ResolvedRun:
    return resolve_run(parse_spec(RECIPE, Run, overrides), base_dir=Path())


def stated(run: ResolvedRun) -> dict[str, Any]:
    """The facts of a run; a least rate has twelve digits."""
    optimizer, final = run.run.training.optimizer, run.run.training.lr_schedule.final
    return {
        "accumulation": run.accumulation,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "decay steps": run.run.training.steps,
        "min_lr": pytest.approx(optimizer.lr * final, rel=1e-12, abs=0),
        "replicas": run.run.layout.data_parallel,
    }


def inverses(rules: Mapping[str, Rule], run: ResolvedRun) -> Iterator[tuple[str, Any]]:
    """Every key of a table that has a value in the run."""
    for key, rule in rules.items():
        with suppress(UserError, AssertionError):  # the value has no name there, or the rule has no inverse
            if (value := write(rule, values_of(run))) is not None:
                yield key, value


@pytest.mark.parametrize("system", TABLES)
def test_what_a_rule_writes_it_reads(system):
    for overrides in RUNS:
        run = resolved(overrides)
        get, ours, keys = values_of(run), decided(run), dict(inverses(TABLES[system], run))
        assert len(keys) >= LEAST
        for key, value in keys.items():
            reading = Reading({"training.steps": (get("training.steps"), "given")})  # intervals depend on it
            reading.take({key: value}, TABLES[system], "file")
            read = {path: said for path, (said, _) in reading.settings.items()}
            assert {path: get(path) for path in read} == read, (key, overrides)
            facts = {name: said for name, (said, _) in reading.facts.items() if name in FACTS}
            assert {name: stated(run)[name] for name in facts} == facts, (key, overrides)
            assert not reading.without, (key, overrides)
            assert not [claim for _, claim in reading.claims if claim.problem(ours)], (key, overrides)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
@pytest.mark.every(4)
def test_every_setting_of_an_imported_recipe_has_its_source(tmp_path: Path, path: Path) -> None:
    """A key with its value, or the file and, in brackets or behind a colon, whose default it is or what it lacks."""
    other = tmp_path / path.name
    other.write_text(path.read_text())
    reading = Outcome.of(other, path.name).reading
    for setting, (_, origin) in [*reading.settings.items(), *reading.defaults.items()]:
        key = any(one in origin for one in reading.seen) or origin.startswith("--")
        assert key or re.match(rf"{re.escape(path.name)}(?: \(.+\)|: .+)", origin), (setting, origin)


def test_a_number_is_written_as_an_integer_where_it_is_one():
    assert (
        repr([write(whole("finetune.alpha"), lambda _, number=number: number) for number in (8.0, 8.5)]) == "[8, 8.5]"
    )


@pytest.mark.parametrize(
    ("value", "settings", "without"),
    [
        (True, {"training.compile": True}, []),
        (1, {}, ["supported: True, a, b"]),  # a number is no switch
        ("b", {"data.order": "b"}, []),
        ("c", {}, ["supported: True, a, b"]),
        ([], {}, ["supported: True, a, b"]),
    ],
)
def test_a_key_does_what_the_rule_of_its_value_does(value, settings, without):
    reading = Reading()
    rule = cases({True: sets({"training.compile": True}), ("a", "b"): "data.order"})
    reading.take({"key": value}, {"key": rule}, "file")
    assert {path: setting for path, (setting, _) in reading.settings.items()} == settings
    assert [reason for _, reason in reading.without] == without


def test_a_claim_and_a_reason_without_effect_are_rules():
    reading = Reading()
    reading.take({"one": 3, "two": "auto"}, {"one": Has("layout.tp", 3), "two": NoEffect.LOGS}, "file")
    assert reading.claims == [("file: one=3", Has("layout.tp", 3))]
    assert reading.no_effect == [("file: two=auto", NoEffect.LOGS)]
