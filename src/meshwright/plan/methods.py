"""Fine-tuning methods compared for one job."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.plan.candidate import Candidate
from meshwright.plan.engine import layout_check, method_fields, runs_today
from meshwright.plan.explain import describe_candidate, recomputes, why_not
from meshwright.plan.job import Job
from meshwright.plan.layouts import Limits
from meshwright.plan.search import Found, search
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


def by_method(job: Job, method: Method) -> Job:
    """The same job trained by another method."""
    return replace(job, **method_fields(method.finetune, job.model))


def compare_methods(
    base: Job, run: Run, model: ModelSpec, cluster: ClusterSpec, limits: Limits, found: Found | None = None
) -> dict[str, Candidate]:
    """The layout to choose for each method, else the one that needs least memory; `found` is the search result for the
    recipe's own method. A method is left out where the engine runs no layout, since then its memory was not
    predicted."""
    best = {}
    for method in METHODS:
        check = layout_check(run.model_copy(update={"finetune": method.finetune}), model)
        job, runs = by_method(base, method), partial(runs_today, check=check)
        result = found if found and method.finetune == run.finetune else None
        result = result or search(job, cluster, top=1, limits=limits, runs=runs)
        runnable = [candidate for candidate in result.strategies.values() if runs(candidate.job)]
        if result.chosen or runnable:
            best[method.name] = result.chosen or min(runnable, key=lambda candidate: candidate.memory.total)
    return best


def method_facts(
    base: Job, run: Run, model: ModelSpec, cluster: ClusterSpec, limits: Limits, found: Found | None = None
) -> dict[str, dict[str, Any]]:
    """The comparison as plain data: bytes, tokens per second and device, the layout, and what is missing if none
    fits."""
    return {
        name: {
            "strategy": best.strategy,
            "text": describe_candidate(best),
            "reason": why_not(best, None) if best.verdict == "does not fit" else None,
            "memory": best.memory.total,
            "tokens_per_second_per_device": best.tokens_per_second,
            "micro_batch": best.job.micro_batch,
            "recompute": recomputes(best.job),
            "verdict": best.verdict,
        }
        for name, best in compare_methods(base, run, model, cluster, limits, found).items()
    }
