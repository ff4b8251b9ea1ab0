"""What-ifs: the effect of options that the recipe does not use or that this engine lacks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.plan.candidate import Candidate, evaluate
from meshwright.plan.changes import CHANGES
from meshwright.plan.job import Job
from meshwright.plan.layouts import Limits
from meshwright.plan.search import search
from meshwright.plan.step_time import DISK_GB_S
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.precision import BF16

LEAST = 0.01
"""Fraction of a step that is worth reporting."""
ENDLESS_GB = 1e9


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


def on_disk(base: Job, cluster: ClusterSpec, limits: Limits, runs: Callable[[Job], bool]) -> Candidate | None:
    """The layout that would be chosen with the optimizer's state on the nodes' disks (`layout.offload.optimizer=disk`);
    None if none fits even so."""
    return search(base, cluster, top=1, limits=replace(limits, change=CHANGES["disk"]), runs=runs).chosen


def on_nvme(base: Job, cluster: ClusterSpec, limits: Limits, runs: Callable[[Job], bool]) -> dict[str, Any] | None:
    """The fastest layout that would fit if offloaded state were on the nodes' disks, whatever its size, and its seconds
    per step, including one read and one write of all of it; None if none fits even so."""
    endless = cluster.model_copy(update={"host_memory_gb": ENDLESS_GB})
    best = search(base, endless, top=1, limits=replace(limits, offload=True), runs=runs).chosen
    if best is None:
        return None
    seconds = best.time.total + 2 * best.memory.host / (DISK_GB_S * 1e9)
    return {"step_time": seconds, "strategy": best.strategy, "devices": cluster.devices, "disk": best.memory.host}
