"""Fine-tuning methods compared for one job."""

from dataclasses import replace
from typing import Any

from meshwright.predict.engine import Case, method_fields, passes
from meshwright.predict.explain import describe_candidate, recomputes, why_not
from meshwright.predict.job import Job
from meshwright.predict.search import SearchResult, search
from meshwright.spec.finetune import LoraSpec

METHODS = {
    "full": None,
    "lora": LoraSpec(method="lora"),
    "qlora": LoraSpec.model_validate({"method": "qlora"}),
}


def by_method(job: Job, finetune: LoraSpec | None) -> Job:
    """The same job trained by another method."""
    return replace(job, **method_fields(finetune, job.model))


def method_facts(case: Case, searched: SearchResult) -> dict[str, dict[str, Any]]:
    """The layout to choose for each method, else the one that needs least memory, as plain data: bytes, tokens per
    second and device, and what is missing if none fits.

    `found` is the search result for the recipe's own method. A method is left out where the engine runs no layout,
    since then its memory was not predicted.
    """
    facts = {}
    for name, finetune in METHODS.items():
        runs = passes(case.check(case.run.model_copy(update={"finetune": finetune})))
        result = searched
        if finetune != case.run.finetune:
            limits = replace(case.limits, runs=runs)
            result = search(by_method(case.base, finetune), case.cluster, top=1, limits=limits)
        runnable = [candidate for candidate in result.strategies.values() if runs(candidate.job)]
        best = result.chosen or min(runnable, key=lambda candidate: candidate.memory.total, default=None)
        if best is None:
            continue
        facts[name] = {
            "strategy": best.strategy,
            "text": describe_candidate(best),
            "reason": why_not(best, None) if best.verdict == "does not fit" else None,
            "memory": best.memory.total,
            "tokens_per_second_per_device": best.tokens_per_second,
            "micro_batch": best.job.micro_batch,
            "recompute": recomputes(best.job),
            "verdict": best.verdict,
        }
    return facts
