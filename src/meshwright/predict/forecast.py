"""A run's predicted memory and time on its devices, and remedies where they are too much."""

from dataclasses import replace
from pathlib import Path

from meshwright.machine import Machine
from meshwright.predict.advice import Enough, advise, fitting
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import MARGIN, Candidate, evaluate
from meshwright.predict.engine import Processor, engine_job, make_case, passes
from meshwright.predict.explain import describe, in_bf16, relief, short
from meshwright.predict.hardware import local_cluster, resolve_cluster
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.search import search
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


def warnings(resolved: ResolvedRun, candidate: Candidate) -> list[str]:
    """Reasons why a valid run would not work, each with a remedy: more memory than the devices have, steps longer than
    `LONGEST_STEP` seconds, or a low precision that a GPU emulates, slower than bf16."""
    lines, where = [], f"{candidate.cluster.devices} x {candidate.cluster.device} ({resolved.run.cluster})"
    if candidate.verdict == "does not fit":
        need, there = candidate.memory.total, candidate.capacity
        if need <= there:  # so it is the host that is too small
            need, there = candidate.host_bytes, candidate.cluster.host_memory_gb * 1e9
        lines.append(
            f"predicted to need {short(need / GIB)} of {short(there / GIB)} GiB on each of {where}; "
            f"{_remedy(resolved, candidate, fitting)}"
        )
    if candidate.time.total > LONGEST_STEP:
        lines.append(
            f"predicted to take {candidate.time.total:,.0f} s a step on {where}; "
            f"{_remedy(resolved, candidate, lambda other: other.time.total <= LONGEST_STEP)}"
        )
    plain = None if candidate.cluster.device == "cpu" else in_bf16(candidate)
    if plain is not None:
        precision, recipe = resolved.run.training.precision, resolved.run.training.product_recipe
        recipe = "" if recipe == precision else f" ({recipe})"
        lines.append(
            f"training.precision={precision}{recipe} has no kernel on {where} and is emulated: predicted to "
            f"take {short(candidate.time.total)} s a step, instead of {short(plain['step_time'])} s with "
            "training.precision=bf16"
        )
    return lines


def _remedy(resolved: ResolvedRun, candidate: Candidate, enough: Enough) -> str:
    """What helps: a change of the layout or another layout, else changes of the recipe or more devices."""
    run, job, cluster = resolved.run, candidate.job, candidate.cluster
    case = make_case(run, resolved.model, cluster, SearchLimits(), job.model)
    if candidate.verdict == "does not fit" and candidate.time.total <= LONGEST_STEP:
        change = relief(job, cluster, MARGIN, offload=False)
        if change:
            return f"this would fit: {change}"
    limits = replace(case.limits, offload=False, runs=passes(case.check(run)))
    other = search(job, cluster, top=1, limits=limits).chosen
    if other and enough(other):
        return f"use layout: auto, which chooses {describe(other.job)}, {short(other.time.total)} s per step"
    words = advise(case, enough)
    if not any(" devices (" in one for one in words):
        words.append("more devices (compare them with meshwright plan RECIPE --cluster 8xh100)")
    return f"no layout of these devices is enough; what would be: {'; or '.join(words)}"
