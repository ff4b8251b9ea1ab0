"""What `import` says of keys that set nothing is so: a claim fails where it is not, and other values are not silent."""

from pathlib import Path

import pytest

from configurations import CORPUS, PACKAGE, Outcome, keys_of, variants
from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.reading import Reading
from meshwright.imports.rules import no_effect, only, unsupported, when
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run

WITH_EFFECT = ("dtype", "shuffle", "decay", "warmup", "dropout", "clip", "accumulation", "momentum", "beta", "lora_r")
"""Parts of names of keys that usually have an effect on training."""
REALLY_NONE = (
    "export_dtype",  # of saved weights
    "eval_accumulation_steps",
    "autocast_dtype",  # only under DDP: AutoModel's FSDP2 has a policy instead
    "pipeline_dtype",
    "lr_warmup_init",
    "lr_warmup_style",
    "no-gradient-accumulation-fusion",
    "gradient_accumulation_fusion",
    "model.gradient_accumulation_fusion",
    "bias_dropout_fusion",
    "no-bias-dropout-fusion",
    "bias_dropout_add_fusion",
    "lr_decay_style",  # where the least rate is the peak
    "lr_decay_steps",
    "lr_decay_starting_step",
)


def test_the_corpus_has_every_reader_at_least_four_times():
    readers = ("deepspeed", "arguments", "accelerate", "axolotl", "factory_", "factory_v1", "foundry", "nanotron")
    readers += ("automodel", "bridge", "nemo", "titan", "nanogpt", "megatron")
    counts = {reader: sum(path.name.startswith(reader) for path in CORPUS) for reader in readers}
    assert len(CORPUS) >= 60
    assert min(counts["bridge"] + counts["nemo"], *(counts[reader] for reader in readers[:8])) >= 4, counts
    assert min(counts[reader] for reader in ("automodel", "titan", "nanogpt", "megatron")) >= 4, counts


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
@pytest.mark.every(4)
def test_every_other_value_of_a_key_without_a_setting_leaves_a_trace(tmp_path: Path, path: Path) -> None:
    """The recipe changes, or the file is refused, or the report of what is not carried over changes; or the key has no
    effect by a reason that holds for every value."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    other = folder / path.name
    other.write_text(path.read_text())
    before = Outcome.of(other, path.name)
    assert not before.refused
    claimed = keys_of([text.partition(": ")[0] + ": " + text.partition(": ")[2] for text in before.reading.already_so])
    without = keys_of([origin for origin, _ in before.reading.no_effect])
    silent, tried = [], set[str]()
    for change, text in variants(path, {*claimed, *without}):
        other.write_text(text)
        after = Outcome.of(other, path.name)
        tried.add(change.partition("=")[0])
        same = after.recipe == before.recipe and not after.refused
        listed = set(after.reading.without) != set(before.reading.without)
        constant = set(after.reading.already_so) == set(before.reading.already_so)
        if same and not listed and not constant:
            silent.append(change)
    assert not silent
    if path.suffix not in (".py", ".sh"):  # of these, switches have no other value, and calls are tried one and all
        assert {*claimed, *without} <= tried


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
@pytest.mark.every(4)
def test_no_key_is_without_effect_whose_name_says_otherwise(tmp_path: Path, path: Path) -> None:
    (tmp_path / path.name).write_text(path.read_text())
    reading = Outcome.of(tmp_path / path.name, path.name).reading
    for key in keys_of([origin for origin, reason in reading.no_effect if reason is not NoEffect.OFF]):
        name = key.rsplit(".", 1)[-1]
        assert name in REALLY_NONE or not any(part in name for part in WITH_EFFECT), key


RECIPE = "model: gpt2-124m\nlayout: {tp: 2, offload: {optimizer: host}}\ntrackers: [wandb]\n"


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Has("layout.tp", 2), True),
        (Has("layout.tp", 1), False),
        (Has("layout.offload.optimizer", "host"), True),
        (Has("layout.offload.parameters", "host"), False),
        (Has("finetune.rank", None), True),
        (HasNot("trackers", "wandb"), False),
        (HasNot("trackers", "tensorboard"), True),
        (HasNot("training.precision", "fp16"), True),
        (Always("weights are never so"), True),
    ],
)
def test_a_claim_is_compared_with_the_recipe(claim, holds):
    reading = Reading()
    origin = reading.read("x.yaml", "key", "value")
    reading.claim(origin, claim)
    reading.conclude(parse_spec(RECIPE, Run))
    assert bool(reading.already_so) is holds
    assert bool(reading.without) is not holds


def test_a_key_that_leaves_nothing_is_listed():
    reading = Reading()
    reading.take({"a": 1, "b": 2}, {"a": lambda reading, value, origin: None, "b": "layout.tp"}, "x.yaml")
    reading.conclude(parse_spec(RECIPE, Run))
    assert reading.without == [("x.yaml: a=1", "nothing in the recipe comes from it")]


def test_a_fact_that_becomes_nothing_is_listed():
    reading = Reading()
    reading.take({"a": 1}, {"a": lambda reading, value, origin: reading.fact("a", value, origin)}, "x.yaml")
    reading.conclude(parse_spec(RECIPE, Run))
    assert reading.without == [("x.yaml: a=1", "nothing in the recipe comes from it")]


def test_the_value_of_another_key_is_not_this_ones():
    """`tp=2` is no part of `tp=24`, nor of `max_tp=2`."""
    reading = Reading()
    for key, value in (("tp", 2), ("max_tp", 2)):
        reading.read("x.yaml", key, value)
    reading.set("layout.pp", 24, "x.yaml: tp=24")
    reading.set("layout.cp", 2, "x.yaml: max_tp=2")
    reading.conclude(parse_spec(RECIPE, Run))
    assert [origin for origin, _ in reading.without] == ["x.yaml: tp=2"]


RULES = {
    "compile": when("training.compile", True),
    "galore": unsupported("GaLore is not supported"),
    "norm": only("rmsnorm", "norms are RMSNorm"),
    "log": no_effect(NoEffect.LOGS),
}


@pytest.mark.parametrize(
    ("values", "listed"),
    [
        ({"compile": False}, []),
        ({"compile": "yes"}, ["compile=yes"]),
        ({"galore": False}, []),
        ({"galore": "none"}, []),
        ({"galore": 3}, ["galore=3"]),
        ({"norm": "rmsnorm"}, []),
        ({"norm": "layernorm"}, ["norm=layernorm"]),
        ({"log": 5}, []),
        ({"log": "auto"}, []),
    ],
)
def test_rules_leave_claims(values, listed):
    reading = Reading()
    reading.take(values, RULES, "x.yaml")
    reading.conclude(parse_spec(RECIPE, Run))
    assert [origin.removeprefix("x.yaml: ") for origin, _ in reading.without] == listed
