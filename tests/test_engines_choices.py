"""Settings whose value is a name: each engine expresses the names that it knows exactly, and refuses others by name."""

import ast
import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from meshwright.engines.engine import InexpressibleError, Translation
from meshwright.engines.registry import ENGINES, WRITTEN, find_engine
from meshwright.imports.recipe import import_files
from meshwright.optim.schedule import SHAPES, lr_factor
from meshwright.spec.base import Spec
from meshwright.spec.precision import BF16, DTYPES
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.schedule import SCHEDULES
from meshwright.spec.training import LrScheduleSpec
from meshwright.trainer.resolve import resolve_run
from test_engines_gpu_only import RECIPE as GPU_RECIPE
from test_engines_gpu_only import VARIANTS as GPU_VARIANTS
from test_engines_written import LAUNCHED, RECIPES, folder  # noqa: F401  (a fixture)

PROGRAM = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, ffn: 64, vocab: 300, max_positions: 64}
data: {sources: a.txt, sequence_length: 32, tokenizer_vocab: 300}
training: {steps: 50, global_batch: 16, micro_batch: 2, precision: fp32}
"""
AXOLOTL = """\
model: {name: ./base, weights: pretrained}
data: {sources: [{path: own.jsonl, format: messages}], sequence_length: 256, packing: best_fit,
  separate_documents: true}
finetune: {method: lora, rank: 4, alpha: 8}
training: {steps: 50, global_batch: 16, micro_batch: 2, recompute: full, lr_schedule: {final: 0}}
"""
OVERRIDES = {
    "nanogpt": ["model={family: gpt2, hidden: 32, num_layers: 2, num_heads: 4, vocab: 300, max_positions: 64}",
                "model.norm_eps=1e-5"],
    "peft": ["finetune={method: lora}", "model.weights=random"],
}  # fmt: skip
SETTINGS = [
    {"warmup": 0},
    {"warmup": 5, "final": 0.25},
    {"warmup": 2, "final": 0.0},
    {"warmup": 7, "final": 1.0},
    {"warmup": 3, "final": 0.5, "decay": 9},
    {"warmup": 45, "decay": 20},
    {"warmup": 50},
]
"""Of a schedule in a run of 50 steps."""
FILES = (*RECIPES, "axolotl")
"""Engines that are systems with a file; the others' files are programs."""
ALL = [name for name in (*ENGINES, *WRITTEN) if name != "meshwright"]


def resolved(name: str, *overrides: str) -> ResolvedRun:
    """A run that the engine expresses."""
    if name in FILES:
        text = AXOLOTL if name == "axolotl" else RECIPES[name]
    else:
        text = GPU_RECIPE.replace("steps: 10", "steps: 50") if name in WRITTEN else PROGRAM
        overrides = (*(GPU_VARIANTS[name][0] if name in WRITTEN else OVERRIDES.get(name, [])), *overrides)
    return resolve_run(parse_spec(text, Run, overrides), base_dir=Path())


def with_value(spec: Any, path: str, value: Any) -> Any:
    """A copy with another value of a setting, which is not validated."""
    name, _, rest = path.partition(".")
    inner = with_value(getattr(spec, name), rest, value) if rest else value
    return spec.model_copy(update={name: inner})


def translate(name: str, run: ResolvedRun) -> tuple[Translation | None, str]:
    """The translation, or why there is none."""
    try:
        return find_engine(name, written=True).translate(run), ""
    except InexpressibleError as error:
        return None, str(error)


def factors(program: str) -> list[float]:
    """The rate of every step, by the program's own function."""
    found = next(node for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)
                 and node.name == "lr_factor")  # fmt: skip
    known: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), "program", "exec"), known)
    return [known["lr_factor"](step) for step in range(1, 51)]


def rates(run: Run) -> list[float]:
    return [lr_factor(run.training.lr_schedule, step, run.training.steps) for step in range(1, run.training.steps + 1)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(1)
def test_the_rate_of_every_step_is_ours_or_the_schedule_is_refused(folder, name):  # noqa: F811
    expressed = set()
    for shape in SHAPES:
        for given in SETTINGS:
            schedule = LrScheduleSpec.model_validate({"name": shape, **given})
            run = resolved(name)
            run = run.model_copy(update={"run": with_value(run.run, "training.lr_schedule", schedule)})
            translation, why = translate(name, run)
            if translation is None:
                assert "training.lr_schedule" in why
                continue
            expressed.add(shape)
            if translation.program.endswith("_standalone.py"):
                theirs = factors(translation.files[translation.program])
            else:
                translation.write(folder / "out")
                ranks = run.run.layout.world_size if name in (*LAUNCHED, "axolotl") else None
                paths = [folder / "out" / file for file in translation.files]
                text, _ = import_files(paths, ranks=ranks, base_dir=folder)
                theirs = rates(parse_spec(text, Run))
            assert theirs == pytest.approx(rates(run.run), rel=1e-5, abs=1e-9), (shape, given)
    assert "constant" in expressed
    assert len(expressed) > 2, expressed


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_that_an_engine_does_not_know_is_refused_by_name(folder, name, monkeypatch):  # noqa: F811
    """As documented, a new schedule is a row of `SHAPES`."""
    monkeypatch.setitem(SHAPES, "sawtooth", lambda schedule, step, steps: 1.0)
    run = resolved(name)
    run = run.model_copy(update={"run": with_value(run.run, "training.lr_schedule.name", "sawtooth")})
    with pytest.raises(InexpressibleError, match=r"training\.lr_schedule\.name=sawtooth: this export supports "):
        find_engine(name, written=True).translate(run)


OURS = ("data.", "model.", "guards.", "training.samples.", "training.evaluation.", "finetune.targets")
"""Settings that are no program's: Meshwright prepares weights and rows for it, or they change no loss."""
OURS += ("training.optimizer.lr_scaling",)
"""The resolved run has the scaled rate."""
ELSEWHERE = ("layout.cp_method", "training.optimizer.rounding", "training.low_precision")
"""Settings that count only where another has another value than in these recipes."""
ELSEWHERE += ("layout.offload", "finetune.method")
"""Names of whole sections, which engines read instead."""
ELSEWHERE += ("model.qk_norm",)
"""Of the resolved model, which is compared whole with the one that a file describes."""


def words_of(annotation: Any) -> Iterator[Any]:
    """The names that an annotation allows."""
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from words_of(part)


def named_settings(spec: Spec, path: str = "") -> Iterator[str]:
    """The paths of settings whose value is a name; `auto` or one number are no choice."""
    for field, info in type(spec).model_fields.items():
        value = getattr(spec, field)
        if isinstance(value, Spec):
            yield from named_settings(value, f"{path}{field}.")
        if len(set(words_of(info.annotation)) - {"auto"}) > 1:
            yield f"{path}{field}"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_name_that_an_engine_does_not_know_is_refused_or_left_out(folder, name, monkeypatch):  # noqa: F811
    """A name that a later version adds does not become another one in silence."""
    monkeypatch.setitem(DTYPES, "fake", BF16)
    run = resolved(name)
    paths = list(named_settings(run.run))
    assert {"device", "training.precision", "training.recompute"} <= set(paths)
    for path in paths:
        if path.startswith((*ELSEWHERE, *(("device",) if name in FILES else OURS))):
            continue
        other = run.model_copy(update={"run": with_value(run.run, path, "fake")})
        with monkeypatch.context() as patch:
            if path == "training.recompute":
                patch.setattr(ResolvedRun, "recompute", ("fake",) * len(run.recompute))
            translation, why = translate(name, other)
        left_out = {setting.path for setting in translation.left_out} if translation else set()
        assert path in why or path in left_out


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "automodel", "megatron_bridge", "megatron_lm", "nanotron",
                                  "torchtitan"])  # fmt: skip
def test_a_pipeline_schedule_that_an_engine_does_not_know_is_refused_by_name(folder, name, monkeypatch):  # noqa: F811
    run = resolved(name, "layout={pp: 2}")
    monkeypatch.setitem(SCHEDULES, "fake", SCHEDULES["1f1b"])
    run = run.model_copy(update={"run": with_value(run.run, "layout.schedule", "fake")})
    with pytest.raises(InexpressibleError, match=r"layout\.schedule=fake"):
        find_engine(name, written=True).translate(run)


def test_names_are_the_recipes_own():
    """A table of names lists only values that a recipe takes."""
    known: dict[str, set[Any]] = {"layout.schedule": set(SCHEDULES), "finetune.base": {"plain", "nf4", "int8"}}
    run = resolved("bare")
    for path in named_settings(run.run):
        parent: Any = reduce(getattr, path.split(".")[:-1], run.run)
        known[path] = set(words_of(type(parent).model_fields[path.rpartition(".")[2]].annotation))
    for engine in (*ENGINES.values(), *WRITTEN.values()):
        for choice in engine.choices:
            assert {*choice.written, *choice.also_read.values()} <= known[choice.path], (engine.name, choice.path)
