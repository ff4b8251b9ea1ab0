"""The one place that says what a way of fine-tuning changes in what is predicted, and compares the ways for one job."""

from dataclasses import dataclass, replace
from typing import Any

from meshwright.plan.job import QUANTIZED, RANK, Job, adapter_parameters
from meshwright.plan.search import Candidate, Limits, search
from meshwright.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    adapters: bool
    quantized: bool


METHODS = (Method("full", False, False), Method("lora", True, False), Method("qlora", True, True))


def by_method(job: Job, method: Method, rank: int = RANK) -> Job:
    """The same job trained by another method."""
    return replace(
        job,
        adapters=float(adapter_parameters(job.model, rank)) if method.adapters else None,
        frozen_bytes=QUANTIZED if method.quantized else None,
    )


def compare_methods(base: Job, cluster: ClusterSpec, limits: Limits, rank: int = RANK) -> dict[str, Candidate | None]:
    """The fastest layout that fits by each method; None where none does."""
    found = {}
    for method in METHODS:
        ranked = search(by_method(base, method, rank), cluster, top=1, limits=limits).ranked
        found[method.name] = ranked[0] if ranked else None
    return found


def method_facts(base: Job, cluster: ClusterSpec, limits: Limits) -> dict[str, Any]:
    """The comparison as plain data: bytes, and tokens a second and device."""
    return {
        name: None
        if best is None
        else {
            "memory": best.memory.total,
            "tokens_per_second_per_device": best.tokens_per_second,
            "micro_batch": best.job.micro_batch,
            "recompute": best.job.recompute,
            "verdict": best.verdict,
        }
        for name, best in compare_methods(base, cluster, limits).items()
    }
