"""The one place that says what a way of fine-tuning changes in what is predicted, and compares the ways for one job."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.plan.engine import layout_check, runs_today
from meshwright.plan.explain import recomputes
from meshwright.plan.job import QUANTIZED, RANK, Job, adapter_parameters
from meshwright.plan.search import Candidate, Limits, search
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Run


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    finetune: LoraSpec | None


METHODS = (
    Method("full", None),
    Method("lora", LoraSpec(method="lora")),
    Method("qlora", LoraSpec.model_validate({"method": "qlora"})),
)


def by_method(job: Job, method: Method, rank: int = RANK) -> Job:
    """The same job trained by another method."""
    return replace(
        job,
        adapters=float(adapter_parameters(job.model, rank)) if method.finetune else None,
        frozen_bytes=QUANTIZED if method.finetune and method.finetune.base == "nf4" else None,
    )


def compare_methods(
    base: Job, run: Run, model: ModelSpec, cluster: ClusterSpec, limits: Limits
) -> dict[str, Candidate | None]:
    """The fastest layout that fits and that the engine runs by each method; None where memory lacks for all of them.
    A method is left out where the engine runs none, for then nobody looked at its memory."""
    found = {}
    for method in METHODS:
        check = layout_check(run.model_copy(update={"finetune": method.finetune}), model)
        legal = partial(runs_today, check=check)
        result = search(by_method(base, method), cluster, top=1, limits=limits, legal=legal)
        if result.looked_at:
            found[method.name] = result.ranked[0] if result.ranked else None
    return found


def method_facts(
    base: Job, run: Run, model: ModelSpec, cluster: ClusterSpec, limits: Limits
) -> dict[str, dict[str, Any] | None]:
    """The comparison as plain data: bytes, and tokens a second and device."""
    return {
        name: None
        if best is None
        else {
            "memory": best.memory.total,
            "tokens_per_second_per_device": best.tokens_per_second,
            "micro_batch": best.job.micro_batch,
            "recompute": recomputes(best.job),
            "verdict": best.verdict,
        }
        for name, best in compare_methods(base, run, model, cluster, limits).items()
    }
