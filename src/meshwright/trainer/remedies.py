"""The cheapest changes that would make a run fit into memory, as overrides to paste. No torch here."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from meshwright.machine import Machine
from meshwright.predict.candidate import MARGIN, Candidate, evaluate, verdict
from meshwright.predict.changes import CHANGES
from meshwright.predict.engine import LayoutCheck, layout_check, refusal
from meshwright.predict.forecast import forecast
from meshwright.predict.job import Job
from meshwright.predict.layouts import divisors
from meshwright.predict.memory import MemoryUse
from meshwright.predict.search import least_recompute
from meshwright.predict.step_time import StepModel
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.recompute import plain_recompute
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import flow, resolve_run

MOST = 5
"""Remedies that are shown."""
LESS = 0.9
"""If memory ran out despite the prediction: the fraction of it that a remedy may use."""
OFFLOADS = ("optimizer", "parameters", "activations")
ON_DISK = ("disk", "disk_parameters")
"""State that can be offloaded, by the names of `predict/changes.py`. On a CPU the device's memory is the host's."""

Fields = dict[str, Any]
"""Fields of a Job and its layout; `offload` is a `Change`."""


@dataclass(frozen=True)
class Remedy:
    """Changes of a recipe with which it would fit."""

    overrides: tuple[str, ...]
    """In the command line's syntax."""
    candidate: Candidate
    """Predicted cost of the changed run."""
    before: float
    """Predicted seconds of an unchanged step."""

    @property
    def words(self) -> str:
        """The overrides in shell syntax."""
        return " ".join(map(shlex.quote, self.overrides))

    @property
    def slower(self) -> float:
        """The relative increase of a step's time."""
        return self.candidate.time.total / self.before - 1


def remedies(resolved: ResolvedRun, machine: Machine, limit: float, *, ran_out: bool = True) -> list[Remedy]:
    """Changes that would fit into `limit` bytes per rank with a tenth of them free, fastest first; each change is
    necessary.

    `ran_out`: the run did not fit, whatever the prediction; then a remedy must save at least a tenth.
    """
    current = forecast(resolved, machine)
    where = current.cluster.model_copy(update={"memory_gb": limit / 1e9})
    most = LESS * current.memory.allocated if ran_out and verdict(current.memory, where, MARGIN) == "fits" else inf

    def enough(use: MemoryUse) -> bool:
        return verdict(use, where, MARGIN) == "fits" and use.allocated <= most

    check = layout_check(resolved.run, resolved.model, machine.kind)
    tried = []
    for change in _changes(current.job, StepModel(current.job, where), enough, machine.kind):
        job = _changed(current.job, change)
        candidate = evaluate(job, where)
        if enough(candidate.memory):
            tried.append((candidate.time.total, len(change), change, candidate))
    kept: list[tuple[Fields, Remedy]] = []
    for _, _, change, candidate in sorted(tried, key=lambda entry: entry[:2]):
        if any(_is_part(other, change) for other, _ in kept):
            continue
        try:
            overrides = tuple(_overrides(resolved, change, _changed(current.job, change), check))
            _legal(resolved, overrides, machine)
        except UserError:
            continue
        kept.append((change, Remedy(overrides, candidate, current.time.total)))
        if len(kept) == MOST:
            break
    return [remedy for _, remedy in kept]


def remedy_lines(fitting: list[Remedy]) -> list[str]:
    """The remedies as readable lines."""
    if not fitting:
        return [
            "no combination of micro_batch, recompute, ZeRO stage and offloading fits; use more devices, a shorter "
            "data.sequence_length or a smaller model"
        ]
    width = max(len(remedy.words) for remedy in fitting)
    return [
        f"{remedy.words:<{width}}  step {remedy.slower:+.0%}, {remedy.candidate.memory.total / 1e9:.3g} GB a rank"
        for remedy in fitting
    ]


def _changes(job: Job, model: StepModel, enough: Callable[[MemoryUse], bool], kind: str) -> Iterator[Fields]:
    """Combinations of the usual changes, with the least recomputation that suffices."""
    layout, dp = job.layout, job.layout.data_parallel
    sizes = [size for size in divisors(max(1, job.global_batch // dp)) if size < job.micro_batch]
    micro: list[Fields] = [{}, *({"micro_batch": size} for size in sizes)]
    zero: list[Fields] = [{}]
    if dp > 1:
        sharded = {"dp_shard": dp, "dp_replicate": 1} if layout.zero_stage == 0 else {}
        zero += [{"zero": stage, **sharded} for stage in range(layout.zero_stage + 1, 4)]
    offload: list[Fields] = [{}]
    if layout.offload == "none":
        offload += [{"offload": CHANGES[name]} for name in (*(OFFLOADS if kind != "cpu" else ()), *ON_DISK)]
    for small, split, moved in product(micro, zero, offload):
        change = {**small, **split, **moved}
        moves_activations = moved["offload"].moves_activations if moved else False
        if moves_activations and job.recompute not in ("none", "full"):
            continue  # refused
        if change:
            yield change
        if moves_activations:
            continue  # less is saved, so there is less to move
        if job.recompute != "full":
            least = least_recompute(StepModel(_changed(job, change), model.cluster), enough, lambda part: False)
            if least is not None and least not in ("none", job.recompute):
                yield {**change, "recompute": least}


def _is_part(one: Fields, other: Fields) -> bool:
    """Whether the second makes all changes of the first, to the same degree or more."""
    if not one.keys() <= other.keys():
        return False
    return "offload" not in one or set(one["offload"].settings) <= set(other["offload"].settings)


def _changed(job: Job, change: Fields) -> Job:
    """The job with the changes."""
    own = {field: value for field, value in change.items() if field in ("micro_batch", "recompute")}
    layout = {field: value for field, value in change.items() if field not in own}
    if "offload" in layout:
        layout |= layout.pop("offload").layout
    return replace(job, **own).with_layout(**layout)


def _overrides(resolved: ResolvedRun, change: Fields, job: Job, check: LayoutCheck) -> Iterator[str]:
    """The changes as overrides of a recipe. Raises `UserError` if the changed layout is refused."""
    if problem := refusal(job, check):
        raise UserError(problem)
    planned = resolved.given is not None and resolved.given.layout.choose
    if planned:
        yield f"layout={flow(job.layout.model_dump(mode='json', exclude_defaults=True) or {'dp_shard': 1})}"
    else:
        for field in ("zero", "dp_shard", "dp_replicate"):
            if field in change:
                yield f"layout.{field}={change[field]}"
        if "offload" in change:
            yield from change["offload"].overrides
    if "micro_batch" in change or planned:
        yield f"training.micro_batch={job.micro_batch}"
    if "recompute" in change:
        yield f"training.recompute={flow(plain_recompute(job.recompute))}"


def _legal(resolved: ResolvedRun, overrides: tuple[str, ...], machine: Machine) -> None:
    """Raise `UserError` if the changed recipe is refused."""
    run = parse_spec(dump_recipe(resolved.given or resolved.run), Run, overrides)
    resolve_run(run, base_dir=Path(resolved.base_dir), machine=machine)
