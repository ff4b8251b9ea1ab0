"""A run's predicted memory and time on its devices, and remedies where they are too much."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.families import PRESETS, resolve_model
from meshwright.machine import Machine
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import MARGIN, Candidate, evaluate
from meshwright.predict.engine import Processor, engine_job, layout_check, passes
from meshwright.predict.explain import describe, in_bf16, relief, short
from meshwright.predict.hardware import local_cluster, resolve_cluster
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.search import recomputing_least, search
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun

LONGEST_STEP = 3600.0
"""Seconds of a step beyond which a recipe is taken for a mistake: the longest steps of published runs take some
minutes."""
GIB = 2**30


def forecast(resolved: ResolvedRun, machine: Machine) -> Candidate:
    """The costs of the run's layout on its devices: the recipe's cluster, or this machine.

    Raises `UserError` for an unknown cluster.
    """
    run, base_dir = resolved.run, Path(resolved.base_dir)
    ranks = run.layout.world_size
    where = resolve_cluster(run.cluster, base_dir=base_dir, machine=machine)
    if run.cluster == "local" and machine.kind == "cpu":
        where = local_cluster(machine, ranks)
    where = where.model_copy(update={"devices": ranks})
    model, batch, size = blueprint(resolved.model), resolved.global_batch, resolved.micro_batch
    job = engine_job(run, model, global_batch=batch, micro_batch=size, processor=Processor.of(where))
    return evaluate(job, where)


def warnings(resolved: ResolvedRun, found: Candidate) -> list[str]:
    """Reasons why a valid run would not work, each with a remedy: more memory than the devices have, steps longer than
    `LONGEST_STEP` seconds, or a low precision that a GPU emulates, slower than bf16."""
    told, where = [], f"{found.cluster.devices} x {found.cluster.device} ({resolved.run.cluster})"
    if found.verdict == "does not fit":
        need, there = found.memory.total, found.capacity
        if need <= there:  # so it is the host that is too small
            need, there = found.host_bytes, found.cluster.host_memory_gb * 1e9
        told.append(
            f"predicted to need {short(need / GIB)} of {short(there / GIB)} GiB on each of {where}; "
            f"{_remedy(resolved, found, lambda other: other.verdict == 'fits')}"
        )
    if found.time.total > LONGEST_STEP:
        told.append(
            f"predicted to take {found.time.total:,.0f} s a step on {where}; "
            f"{_remedy(resolved, found, lambda other: other.time.total <= LONGEST_STEP)}"
        )
    plain = None if found.cluster.device == "cpu" else in_bf16(found)
    if plain is not None:
        precision, recipe = resolved.run.training.precision, resolved.run.training.product_recipe
        recipe = "" if recipe == precision else f" ({recipe})"
        told.append(
            f"training.precision={precision}{recipe} has no kernel on {where} and is emulated: predicted to take "
            f"{short(found.time.total)} s a step, instead of {short(plain['step_time'])} s with training.precision=bf16"
        )
    return told


def _remedy(resolved: ResolvedRun, found: Candidate, enough: Callable[[Candidate], bool]) -> str:
    """The first remedy that helps: a change of the layout, another layout, or a smaller published model."""
    job, cluster = found.job, found.cluster
    change = (
        relief(job, cluster, MARGIN) if found.verdict == "does not fit" and found.time.total <= LONGEST_STEP else None
    )
    if change:
        return f"this would fit: {change}"
    check = layout_check(resolved.run, resolved.model, Processor.of(cluster).kind)
    other = search(job, cluster, top=1, limits=SearchLimits(runs=passes(check))).chosen
    if other and enough(other):
        return f"use layout: auto, which chooses {describe(other.job)}, {short(other.time.total)} s per step"
    size = job.model.num_parameters
    smaller = [(name, _of_preset(found, name)) for name in PRESETS]
    fitting = [(one.job.model.num_parameters, name) for name, one in smaller if one is not None and enough(one)]
    named = [(numel, name) for numel, name in fitting if numel < size]
    more = "more devices (compare them with meshwright plan RECIPE --cluster 8xh100)"
    return f"no layout of these devices is enough; use {more}" + (f", or model={max(named)[1]}" if named else "")


def _of_preset(found: Candidate, name: str) -> Candidate | None:
    """The same run of a published size, with the least recomputation that fits; None if its layers are too few."""
    try:
        model = blueprint(resolve_model(PRESETS[name], base_dir=Path()))
    except UserError:
        return None
    if model.num_layers < len(found.job.cut):
        return None
    job = recomputing_least(replace(found.job, model=model, recompute="none"), found.cluster)
    return evaluate(job, found.cluster)
