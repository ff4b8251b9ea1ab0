"""What-ifs: the effect of options that the recipe does not use or that this engine lacks."""

from dataclasses import replace

from meshwright.plan.candidate import Candidate, evaluate
from meshwright.plan.changes import CHANGES
from meshwright.plan.job import Job
from meshwright.plan.layouts import Limits
from meshwright.plan.search import search
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.precision import BF16

LEAST = 0.01
"""Fraction of a step that is worth reporting."""


def in_fp8(candidate: Candidate) -> dict[str, float] | None:
    """Seconds of a step of the same layout with its blocks' matrix products in fp8, and the fraction of the step that
    this saves; None if the device has no fp8, or nothing is saved."""
    job, cluster = candidate.job, candidate.cluster
    if job.precision.products != BF16.name or "fp8" not in cluster.tflops:
        return None
    quantized = replace(job, precision=replace(job.precision, recipe="fp8"))
    seconds = evaluate(quantized, cluster, candidate.margin).time.total
    saved = 1 - seconds / candidate.time.total
    return {"step_time": seconds, "saved": saved} if saved > LEAST else None


def in_bf16(candidate: Candidate) -> dict[str, float] | None:
    """Seconds of a step of the same layout in bf16 if its low-precision products are emulated, and the fraction of the
    step that this saves; None if they are not."""
    job = candidate.job
    if not job.stack.emulated:
        return None
    stack = replace(job.stack, emulated=False, coded_inputs="none")
    plain = replace(job, precision=replace(job.precision, recipe=None), stack=stack)
    seconds = evaluate(plain, candidate.cluster, candidate.margin).time.total
    return {"step_time": seconds, "saved": 1 - seconds / candidate.time.total}


def on_disk(base: Job, cluster: ClusterSpec, limits: Limits) -> Candidate | None:
    """The layout that would be chosen with the optimizer's state on the nodes' disks, and parameters too if it does not
    fit otherwise; None if none fits even so."""
    for name in ("disk", "disk_parameters"):
        if found := search(base, cluster, top=1, limits=replace(limits, change=CHANGES[name])).chosen:
            return found
    return None
