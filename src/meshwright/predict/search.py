"""The search for the best layout: exact, although most layouts are never evaluated.

Layouts are ordered by a lower bound for any network: their computation spread evenly over the stages. Once that bound
exceeds the best cost so far, no remaining layout can win. So the result equals brute force (a test compares).

Every layout recomputes the least with which every pipeline rank fits, layer by layer; exact. Recomputing less only
saves time, and a step never takes longer when one of its ranks is faster, so each rank is solved by itself. In each
stage the first layers recompute everything, the next ones selectively (`spec/recompute.py`): more of either means less
memory and more time. So for every number of the first, bisection finds the fewest of the second; numbers that by
themselves take longer than the best so far are skipped.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from meshwright.predict.candidate import (
    MARGIN,
    VERDICTS,
    Candidate,
    complexity,
    evaluate,
    family_name,
    verdict,
)
from meshwright.predict.job import Job
from meshwright.predict.layouts import SearchLimits, layouts
from meshwright.predict.memory import MemoryUse, RankMemory, least_memory, predict_memory
from meshwright.predict.pipeline import schedule_waiting
from meshwright.predict.step_time import Cache, StepModel
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recompute import Counts, Recompute, of_counts, recompute_misfit

ALIKE = 0.03
"""Fraction of a step within which two layouts count as equally fast: predictions are off by more."""


@dataclass(frozen=True)
class Variant:
    """A job to search the layouts of: the recipe's, or the recipe's with a change."""

    base: Job
    limits: SearchLimits
    cache: Cache = field(default_factory=dict, init=False)

    def family(self, layout: LayoutSpec) -> str:
        """The strategy that a layout is compared as; all of a change are one."""
        return f"with {self.limits.change.name}" if self.limits.change else family_name(layout)

    def complexity(self, layout: LayoutSpec) -> int:
        """As `Candidate.complexity`."""
        return complexity(layout) + (len(self.limits.change.settings) if self.limits.change else 0)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    ranked: tuple[Candidate, ...]
    """The layouts of least cost, best first."""
    strategies: dict[str, Candidate]
    """The best layout of every strategy: least cost, else least memory."""
    chosen: Candidate | None
    """The choice among layouts that run and cost at most `ALIKE` more than the best: one that fits before a tight one,
    then the simplest, then the cheapest; None if none runs."""
    fastest: Candidate | None
    """The layout of least cost that runs."""
    looked_at: int
    """Layouts whose memory and time were predicted."""
    legal: int
    """Number of legal layouts."""


class _Best:
    """The best layouts so far, and the bound on a step's seconds that rules a layout out."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.ranked: list[Candidate] = []
        self.strategies: dict[str, Candidate] = {}
        self.smallest: dict[str, tuple[float, Job, Variant]] = {}
        """For every strategy, (bytes, layout, variant) of the layout of least memory that does not fit."""
        self.running: dict[tuple[bool, int], Candidate] = {}
        """The best layout that runs, by (tight, complexity)."""

    def beaten(self, least: float, name: str, plain: int) -> bool:
        """Whether a layout of strategy `name` and complexity `plain` that takes at least `least` cannot appear in the
        result."""
        if len(self.ranked) < self.top or least <= self.ranked[-1].cost:
            return False
        if name not in self.strategies or least <= self.strategies[name].cost:
            return False
        limit = min((candidate.cost for candidate in self.running.values()), default=inf) * (1 + ALIKE)
        rival = self.running.get((False, plain))
        return least > limit or (rival is not None and least > rival.cost)

    def hopeless(self, least: float, capacity: float, name: str) -> bool:
        """Whether a layout of strategy `name` that needs at least `least` bytes neither fits nor needs the least."""
        if least <= capacity:
            return False
        return name in self.strategies or (name in self.smallest and least >= self.smallest[name][0])

    def add(self, name: str, candidate: Candidate, runs: Callable[[Job], bool]) -> None:
        """Rank a layout that fits or is tight; `runs`: as in `SearchLimits`."""
        if name not in self.strategies or _rank(candidate) < _rank(self.strategies[name]):
            self.strategies[name] = candidate
        key = candidate.verdict == "tight", candidate.complexity
        rival = self.running.get(key)
        if (rival is None or _rank(candidate) < _rank(rival)) and runs(candidate.job):
            self.running[key] = candidate
        self.ranked.append(candidate)
        self.ranked.sort(key=_rank)
        del self.ranked[self.top :]

    def fastest(self) -> Candidate | None:
        """The layout of least cost that runs."""
        return min(self.running.values(), key=_rank, default=None)

    def chosen(self) -> Candidate | None:
        """See `SearchResult.chosen`."""
        fastest = self.fastest()
        if fastest is None:
            return None
        return min(
            (entry for entry in self.running.items() if entry[1].cost <= (1 + ALIKE) * fastest.cost),
            key=lambda entry: (entry[0], _rank(entry[1])),
        )[1]


def search(
    base: Job,
    cluster: ClusterSpec,
    *,
    top: int = 10,
    limits: SearchLimits | None = None,
    prune: bool = True,
    beside: Sequence[Variant] = (),
) -> SearchResult:
    """The `top` best layouts of `base`'s model and batch on all of the cluster's devices, each strategy's best, and the
    one to choose; the layouts of the variants `beside` it compete.

    Every layout uses the least recomputation that fits, because more only costs time. `prune=False` evaluates every
    layout, for comparison.
    """
    variants = [
        Variant(replace(variant.base, recompute="none") if variant.limits.recompute else variant.base, variant.limits)
        for variant in (Variant(base, limits or SearchLimits()), *beside)
    ]
    bounded = [(*entry, variant) for variant in variants for entry in _bounded(variant, cluster)]
    bounded.sort(key=lambda entry: entry[0])
    best, looked_at = _Best(top), 0
    for least, layout, micro, variant in bounded:
        name, plain = variant.family(layout), variant.complexity(layout)
        job = replace(variant.base, layout=layout, micro_batch=micro)
        if (prune and best.beaten(least, name, plain)) or recompute_misfit(job.recompute, job.cut):
            continue
        if prune and best.hopeless(least_memory(job), cluster.memory_gb * 1e9, name):
            continue
        looked_at += 1
        limits, cache = variant.limits, variant.cache
        if limits.recompute:

            def beaten(job: Job, name: str = name, plain: int = plain, cache: Cache = cache) -> bool:
                return prune and best.beaten(StepModel(job, cluster, cache=cache).predict().total, name, plain)

            candidate = _recomputing_least(job, cluster, limits, cache, beaten, wanted=name not in best.strategies)
            if candidate is None:
                continue
            job, memory = candidate
        else:
            memory = predict_memory(job)
        if verdict(memory, cluster, limits.margin) == "does not fit":
            if name not in best.smallest or memory.total < best.smallest[name][0]:
                best.smallest[name] = (memory.total, job, variant)
            continue
        time = StepModel(job, cluster, cache=cache).predict()
        best.add(name, Candidate(job, cluster, limits.margin, memory, time, limits.change), limits.runs)
    strategies = dict(best.strategies)
    for name, (_, job, variant) in best.smallest.items():
        lost = evaluate(job, cluster, variant.limits.margin)
        strategies.setdefault(name, replace(lost, change=variant.limits.change))
    return SearchResult(tuple(best.ranked), strategies, best.chosen(), best.fastest(), looked_at, len(bounded))


def _bounded(variant: Variant, cluster: ClusterSpec) -> list[tuple[float, LayoutSpec, int]]:
    """(lower bound in seconds, layout, microbatch) for every legal layout and microbatch of a variant."""
    base, cache = variant.base, variant.cache
    microbatch: dict[tuple[int, ...], float] = {}
    update: dict[int, float] = {}
    quantized, variants = base.precision.recipe is not None, []
    for layout, micro in layouts(base, cluster, variant.limits):
        key = (layout.tp, layout.cp, layout.ep, micro)
        if quantized:  # once for all microbatches
            key = (*key, layout.data_parallel)
        if key not in microbatch:
            microbatch[key] = StepModel(
                replace(base, layout=layout, micro_batch=micro), cluster, cache=cache
            ).microbatch()
        least = _least(microbatch[key], base, layout, micro)
        if layout.offload != "none":
            if id(layout) not in update:  # the same for all microbatches
                model = StepModel(replace(base, layout=layout, micro_batch=micro), cluster, cache=cache)
                update[id(layout)] = min(model.update(stage) for stage in range(layout.pp))
            least += update[id(layout)]
        variants.append((least, layout, micro))
    return variants


def _least(microbatch: float, base: Job, layout: LayoutSpec, micro: int) -> float:
    """A lower bound in seconds for any arrangement of stages: all equally long, without communication between ranks.

    A stage longer than the others costs more than it saves in the bubble, because there are more microbatches than
    waiting stages.
    """
    pp, microbatches = layout.pp, base.global_batch // (layout.data_parallel * micro)
    if pp == 1:
        return microbatch * microbatches
    share = schedule_waiting(layout.schedule, pp, microbatches, layout.virtual_stages).share
    return microbatch / pp * (microbatches + (pp - 1) * min(share, microbatches))


def recomputing_least(job: Job, cluster: ClusterSpec, margin: float = MARGIN) -> Job:
    """The same layout with the least recomputation that fits, else the least that is tight, else full recomputation."""
    least = _recomputing_least(
        replace(job, recompute="none"), cluster, SearchLimits(margin=margin), {}, lambda _: False, wanted=True
    )
    assert least is not None
    return least[0]


def _recomputing_least(
    plain: Job, cluster: ClusterSpec, limits: SearchLimits, cache: Cache, beaten: Callable[[Job], bool], *, wanted: bool
) -> tuple[Job, MemoryUse] | None:
    """The layout with the least recomputation that fits, else the least that is tight, else full recomputation; None if
    even the layout without recomputation is slower than the best, or if it does not fit and is not `wanted` then."""
    if not wanted and beaten(plain):
        return None
    capacity = cluster.memory_gb * 1e9
    memory = predict_memory(plain, enough=capacity)
    before = verdict(memory, cluster, limits.margin)
    if before == "fits":
        return plain, memory
    if memory.states > capacity and not wanted:  # which no recomputation mends
        return None
    everything = replace(plain, recompute="full")
    memory = predict_memory(everything, enough=inf if wanted else capacity)
    best = verdict(memory, cluster, limits.margin)
    if best == "does not fit":
        return everything, memory
    if wanted and beaten(plain):
        return None
    if plain.layout.tiers.activations == "host":  # what selective recomputation keeps cannot be moved
        return (plain, predict_memory(plain)) if best == before else (everything, memory)
    worst = VERDICTS.index(best)
    least = least_recompute(
        StepModel(plain, cluster, cache=cache),
        lambda use: VERDICTS.index(verdict(use, cluster, limits.margin)) <= worst,
        lambda part: beaten(replace(plain, recompute=part)),
    )
    if least is None:
        return None
    job = replace(plain, recompute=least)
    return job, predict_memory(job)


Enough = Callable[[MemoryUse], bool]
"""Whether a rank has enough memory."""


def least_recompute(model: StepModel, enough: Enough, beaten: Callable[[Recompute], bool]) -> Recompute | None:
    """The fastest recomputation of `model`'s job with which all ranks have enough memory, whatever the job recomputes
    itself; None if a part of it is `beaten` already, or where no recomputation suffices."""
    job, counts = model.job, [(0, 0)] * len(model.job.cut)
    for rank in range(job.layout.pp):
        least = _least_of_rank(model, rank, enough)
        if least is None:
            return None
        for stage in job.stages[rank]:
            full = min(least[0], job.cut[stage])
            counts[stage] = full, min(least[1], job.cut[stage] - full)
        if rank == 0 < job.layout.pp - 1 and beaten(of_counts(counts, job.cut)):
            return None
    return of_counts(counts, job.cut)


def _least_of_rank(model: StepModel, rank: int, enough: Enough) -> Counts | None:
    job = model.job
    layers = max(stop - start for start, stop in job.spans[rank])

    memory = RankMemory(job, rank)

    def suffices(full: int, selective: int) -> bool:
        return enough(memory.use(job.grouped(rank, full, selective)))

    def seconds(full: int, selective: int) -> float:
        return model.repeated(job.grouped(rank, full, selective))

    if suffices(0, 0):
        return 0, 0
    fewest = bisect_left(range(layers + 1), True, key=lambda full: suffices(full, layers - full))
    best: tuple[float, Counts] | None = None
    for full in range(fewest, layers + 1):
        if best is not None and seconds(full, 0) >= best[0]:
            break
        selective = bisect_left(range(layers - full), True, key=lambda number, full=full: suffices(full, number))
        if best is None or seconds(full, selective) < best[0]:
            best = seconds(full, selective), (full, selective)
    return best and best[1]


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Sort key: cost, then memory."""
    return candidate.cost, candidate.memory.total
