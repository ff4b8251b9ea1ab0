"""A plan's contents as plain data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.predict.advice import advise
from meshwright.predict.candidate import Candidate, evaluate
from meshwright.predict.changes import LAST_RESORT, Change
from meshwright.predict.engine import Case, LayoutCheck, passes, refusal
from meshwright.predict.explain import (
    bandwidth,
    binding,
    compiled_gain,
    describe_candidate,
    in_bf16,
    in_fp8,
    in_fp16,
    no_layout,
    relief,
    why_not,
)
from meshwright.predict.hardware import ELSEWHERE
from meshwright.predict.interval import NOMINAL, PredictionInterval
from meshwright.predict.job import Job
from meshwright.predict.methods import method_facts
from meshwright.predict.search import SearchResult, Variant, search
from meshwright.spec.errors import UserError
from meshwright.spec.recompute import plain_recompute

STEP_PARTS = ("compute", "recompute", "tensor", "context", "expert", "data", "pipeline", "bubble", "update")
DIGITS = 8
"""Significant digits of a plan's figures: those that do not depend on Python's release and its library of functions,
so that a plan is the same text everywhere."""
MOST_FOR_METHODS = 64
"""Number of devices up to which a plan also compares fine-tuning by adapters."""


@dataclass(frozen=True)
class Plan:
    """The search result for one recipe on one cluster, and facts derived from it."""

    case: Case
    check: LayoutCheck
    """Returns why the engine refuses a layout."""
    searched: SearchResult
    given: Candidate | None
    """The recipe's own layout, if it sets one."""
    considered: tuple[Change, ...] = ()
    """The changes that were compared."""
    last_resort: bool = False
    """Whether they are those that a plan tries by itself, because no layout fits without it."""

    @property
    def chosen(self) -> Candidate | None:
        """The layout to run; None if no layout that the engine runs fits or is tight."""
        return self.searched.chosen

    @property
    def best(self) -> Candidate | None:
        """The chosen layout, else the fastest; None if none fits."""
        return self.chosen or (self.searched.ranked[0] if self.searched.ranked else None)

    @property
    def problem(self) -> str | None:
        """Why nothing was chosen; None if something was, or where memory is missing, which the strategies report."""
        if self.chosen:
            return None
        if not self.searched.legal:
            return no_layout(self.case.base, self.case.cluster, self.case.limits)
        return self.refusal(self.searched.ranked[0]) if self.searched.ranked else None

    @cached_property
    def relief(self) -> str | None:
        """The cheapest change with which the recipe's own layout fits; None if it fits, or nothing usual helps."""
        if self.given is None or self.given.verdict == "fits":
            return None
        limits = self.case.limits
        return relief(self.given.job, self.given.cluster, limits.margin, offload=limits.offload)

    @cached_property
    def advice(self) -> list[str]:
        """What would fit, where no layout of these devices does."""
        return [] if self.searched.ranked or not self.searched.legal else advise(self.case)

    def refusal(self, candidate: Candidate) -> str | None:
        """Why the engine does not run a layout; None if it does."""
        change = candidate.change
        if change is None:
            return refusal(candidate.job, self.check)
        if change.emulated:
            return (
                f"this version emulates training.precision={candidate.job.precision}, slower than bf16; the figures "
                "assume native kernels"
            )
        return refusal(candidate.job, self.case.check(change.of(self.case.run)))

    def reason(self, candidate: Candidate) -> str:
        """Why a strategy's best layout is not the chosen one."""
        if candidate.verdict != "does not fit" and self.refusal(candidate):
            return "refused: this version cannot run it"
        return why_not(candidate, self.best)

    def run_seconds(self, candidate: Candidate) -> PredictionInterval:
        """Seconds of the whole run."""
        return candidate.seconds.scaled(self.case.run.training.steps)

    def cost(self, candidate: Candidate) -> PredictionInterval | None:
        """Price of the whole run; None if a device's price is unknown."""
        cluster = self.case.cluster
        price = cluster.price_per_hour
        if price is None:
            return None
        return self.run_seconds(candidate).scaled(price * cluster.devices / 3600)


def make_plan(case: Case, given: Job | None, *, top: int, consider: Sequence[Change] = ()) -> Plan:
    """Search for the layout of a case, and predict the `given` one; layouts with the changes to `consider` compete.

    Where nothing fits with its margin, exact changes are tried (`LAST_RESORT`). Raises `UserError` for a change that
    says nothing here.
    """
    check, limits, cluster = case.check(case.run), case.limits, case.cluster

    def searched(changes: Sequence[Change]) -> SearchResult:
        beside = [_variant(case, change) for change in changes]
        return search(case.base, cluster, top=top, limits=replace(limits, runs=passes(check)), beside=beside)

    result, changes = searched(consider), tuple(consider)
    last = (
        (result.chosen is None or result.chosen.verdict == "tight")
        and not consider
        and limits.offload
        and cluster.device != "cpu"
    )
    if last and result.legal:
        movable = limits.recompute or case.base.recompute in ("none", "full")
        changes = tuple(change for change in LAST_RESORT if movable or not change.moves_activations)
        result = searched(changes)
    own = None
    if given:
        own = evaluate(given, cluster.model_copy(update={"devices": given.layout.world_size}), limits.margin)
    return Plan(case, check, result, own, changes, last)


def _variant(case: Case, change: Change) -> Variant:
    """The recipe with a change, to search. Raises `UserError` if the change says nothing on this cluster."""
    run, cluster, what = case.run, case.cluster, f"--consider {change.name}"
    if cluster.device == "cpu" and "host" in dict(change.settings).values():
        raise UserError(f"{what}: saves nothing on a CPU, whose device memory is host memory")
    if change.moves_activations and not case.limits.recompute and case.base.recompute not in ("none", "full"):
        raise UserError(
            f"{what}: cannot offload the tensors that selective recomputation keeps; use training.recompute=full"
        )
    changed = change.of(run)
    products = changed.training.dtypes.products
    if products != run.training.dtypes.products and products not in cluster.tflops:
        raise UserError(
            f"{what}: {cluster.device} has no {products} matrix products, so training.precision="
            f"{changed.training.precision} would be slower than {run.training.precision}"
        )
    job, runs = case.job(changed), passes(case.check(changed))
    if change.emulated:
        job, runs = replace(job, stack=replace(job.stack, emulated=False)), lambda job: False
    return Variant(job, replace(case.limits, change=change, runs=runs))


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: bytes, seconds, and the interval of each; the shape of `plan --json` and `plan.json`."""
    cluster = plan.case.cluster.model_dump(mode="json", exclude_defaults=True)
    return {"cluster": cluster} | rounded(_facts(plan))


def rounded(value: Any) -> Any:
    """Plain data with every number that is no integer rounded to `DIGITS` digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _facts(plan: Plan) -> dict[str, Any]:
    """All but the cluster."""
    case = plan.case
    facts: dict[str, Any] = {
        "interval": NOMINAL,
        "margin": case.limits.margin,
        "steps": case.run.training.steps,
        "model": case.run.model.name or case.spec.family,
        "parameters": case.base.model.num_parameters,
        "sequence_length": case.run.data.sequence_length,
        "sequences_per_step": case.base.global_batch,
        "runs_on_it": case.cluster.device == "cpu" or not case.cluster.device.startswith(ELSEWHERE),
        "epochs": case.run.training.epochs,
        "chosen": candidate_facts(plan, plan.chosen) if plan.chosen else None,
        "given": candidate_facts(plan, plan.given) if plan.given else None,
        "candidates": [candidate_facts(plan, candidate) for candidate in plan.searched.ranked],
        "strategies": {
            name: candidate_facts(plan, candidate) | {"reason": plan.reason(candidate)}
            for name, candidate in sorted(plan.searched.strategies.items(), key=_order)
        },
        "problem": plan.problem,
        "searched": {"legal": plan.searched.legal, "predicted": plan.searched.looked_at},
    }
    if case.limits.methods and case.cluster.devices <= MOST_FOR_METHODS:
        facts["methods"] = method_facts(case, plan.searched)
    facts["considered"] = {
        change.name: {"overrides": list(change.overrides), "exact": change.exact} for change in plan.considered
    }
    facts["last_resort"] = plan.last_resort
    if plan.chosen:
        fastest = plan.searched.fastest
        facts["fastest"] = candidate_facts(plan, fastest) if fastest and fastest.job != plan.chosen.job else None
        facts["binding"] = binding(plan.chosen)
        facts["bandwidth"] = bandwidth(plan.chosen)
        facts["compile"] = compiled_gain(plan.chosen)
        facts["fp8"] = in_fp8(plan.chosen)
        facts["emulated"] = in_bf16(plan.chosen)
        facts["fp16"] = in_fp16(plan.chosen)
    elif plan.searched.legal and not plan.searched.ranked:
        facts["advice"] = plan.advice
    if plan.relief:
        facts["relief"] = plan.relief
    return facts


def candidate_facts(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """One layout's predictions."""
    time, cost, missing = candidate.time, plan.cost(candidate), plan.refusal(candidate)
    return {
        "strategy": candidate.strategy,
        "text": describe_candidate(candidate),
        "change": candidate.change.name if candidate.change else None,
        "verdict": candidate.verdict,
        "runs_today": missing is None,
        "missing": missing,
        "layout": None if missing else candidate.job.layout.model_dump(mode="json", exclude_defaults=True),
        "micro_batch": candidate.job.micro_batch,
        "accumulation": candidate.job.microbatches,
        "recompute": plain_recompute(candidate.job.recompute),
        "memory": {kind: round(size) for kind, size in candidate.memory.kinds().items()},
        "memory_total": asdict(candidate.memory_bytes),
        "memory_available": candidate.capacity,
        "host_memory": candidate.memory.host,
        "disk": candidate.memory.disk,
        "step_time": asdict(candidate.seconds),
        "step_parts": {name: getattr(time, name) for name in STEP_PARTS},
        "tokens_per_second_per_device": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "run_seconds": asdict(plan.run_seconds(candidate)),
        "run_cost": asdict(cost) if cost else None,
    }


def _order(entry: tuple[str, Candidate]) -> tuple[bool, float]:
    """Sort key: layouts that fit by time, then the others by memory."""
    candidate = entry[1]
    lost = candidate.verdict == "does not fit"
    return lost, candidate.memory.total if lost else candidate.time.total
