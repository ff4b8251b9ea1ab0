"""The one place that looks for the best layout: every legal one, most of them without being looked at.

Layouts are ordered by what no network can undercut, their computation spread evenly over the stages; once that exceeds
the best found so far, neither they nor any that follow can win. So the result is that of brute force (a test compares).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

from meshwright.plan.interval import Interval, memory_sigma, time_sigma
from meshwright.plan.job import Job
from meshwright.plan.memory import MemoryUse, predict_memory
from meshwright.plan.pipeline import schedule_waiting
from meshwright.plan.recompute import least_recompute
from meshwright.plan.step_time import Cache, StepModel, StepTime
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.recompute import recompute_misfit
from meshwright.spec.schedule import schedule_kind

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "does not fit")
AXES = ("pp", "tp", "cp", "ep")
"""Axes that split the model or its sequences."""
MARGIN = 0.1
"""Part of a device's memory that a plan leaves free unless it is told otherwise."""
MOST_TENSOR = 16
MOST_CONTEXT = 64
MOST_STAGES = 64
MOST_MICROBATCH = 16
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8)
MOST_SPLIT = 16
"""Degrees beyond which no published run has gone (context: Llama 3 on 128k tokens; stages: Megatron's trillion)."""
SHORTEST_PART = 1024
"""Tokens of a sequence below which context parallelism is not worth a message."""


@dataclass(frozen=True)
class Limits:
    """What a search may choose."""

    margin: float = MARGIN
    offload: bool = False
    """Whether state may live in host memory."""
    recompute: bool = True
    """Whether the recomputation policy is open."""
    micro_batch: bool = True
    """Whether the microbatch is open."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs."""

    job: Job
    cluster: ClusterSpec
    margin: float
    memory: MemoryUse
    time: StepTime

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.cluster.memory_gb * 1e9

    @property
    def verdict(self) -> Verdict:
        """fits with the margin left free; tight where an allocator under pressure may still make it."""
        return verdict(self.memory, self.cluster, self.margin)

    @property
    def host_bytes(self) -> float:
        """Bytes that offloading takes of a node's own memory."""
        return self.memory.host * self.cluster.per_node

    @property
    def seconds(self) -> Interval:
        """Seconds of a step."""
        return Interval.spread(self.time.total, time_sigma(self.time, self.job, self.cluster))

    @property
    def memory_bytes(self) -> Interval:
        """Bytes of the rank that needs most."""
        return Interval.spread(self.memory.total, memory_sigma(self.memory, self.job))

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and device."""
        return self.job.global_batch * self.job.sequence / self.time.total / self.cluster.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, of the datasheet's rate in the job's precision."""
        peak = self.cluster.tflops.get(self.job.precision) or self.cluster.tflops["bf16"]
        return self.tokens_per_second * self.job.flops_per_token / (peak * 1e12)

    @cached_property
    def strategy(self) -> str:
        """The field's name for the layout."""
        return strategy_name(self.job)


def verdict(memory: MemoryUse, cluster: ClusterSpec, margin: float) -> Verdict:
    """Whether a rank's need fits a device, of which a share is to stay free, and that of a node's ranks their host."""
    capacity = cluster.memory_gb * 1e9
    if memory.host * cluster.per_node > (1 - margin) * cluster.host_memory_gb * 1e9:
        return "does not fit"
    if memory.total <= (1 - margin) * capacity:
        return "fits"
    return "tight" if memory.least <= capacity else "does not fit"


def strategy_name(job: Job) -> str:
    """`ZeRO-3`, `hybrid ZeRO-3`, `TP + ZeRO-1`, `PP + TP + DDP` and so on."""
    if job.zero == 0 or job.shards == 1:
        state = "DDP" if job.dp > 1 else ""
    else:
        state = f"{'hybrid ' if job.dp_replicate > 1 else ''}ZeRO-{job.zero}"
    axes = [axis.upper() for axis in AXES if getattr(job, axis) > 1]
    name = " + ".join([*axes, *([state] if state else [])]) or "one device"
    return name + (" + CPU offload" if job.offload != "none" else "")


def family_name(choice: dict[str, Any]) -> str:
    """What a layout is compared as: its data-parallel strategy, or the axes that split the model."""
    offload = " + CPU offload" if choice["offload"] != "none" else ""
    axes = [axis.upper() for axis in AXES if choice[axis] > 1]
    if axes:
        return " + ".join(axes) + offload
    if choice["dp_replicate"] * choice["dp_shard"] == 1:
        return "one device" + offload
    if choice["zero"] == 0:
        return "DDP" + offload
    return f"{'hybrid ' if choice['dp_replicate'] > 1 else ''}ZeRO-{choice['zero']}{offload}"


def evaluate(job: Job, cluster: ClusterSpec, margin: float = MARGIN, cache: Cache | None = None) -> Candidate:
    """What one layout costs."""
    return Candidate(job, cluster, margin, predict_memory(job), StepModel(job, cluster, cache=cache).predict())


@dataclass(frozen=True)
class Found:
    """What a search brought back."""

    ranked: tuple[Candidate, ...]
    """The fastest that fit, fastest first; behind them tight ones."""
    strategies: dict[str, Candidate]
    """The best of every strategy: the fastest that fits, else the one that needs least memory."""
    looked_at: int
    """Layouts whose memory and time were predicted."""
    legal: int
    """Layouts that there were."""


def search(
    base: Job,
    cluster: ClusterSpec,
    *,
    top: int = 10,
    limits: Limits | None = None,
    legal: Callable[[Job], bool] | None = None,
    prune: bool = True,
) -> Found:
    """The `top` fastest layouts of `base`'s model and batch on all of the cluster's devices, and each strategy's best.

    Every layout is taken with the least recomputation that fits, for more only costs time. `prune` False looks at every
    layout, for comparison. `legal` leaves out what it is False for: what an engine cannot run.
    """
    limits = limits or Limits()
    cache: Cache = {}
    base = replace(base, recompute="none") if limits.recompute else base
    bounded = _bounded(base, cluster, limits, cache)
    ranked: list[Candidate] = []
    best: dict[str, Candidate] = {}
    smallest: dict[str, tuple[float, Job]] = {}
    looked_at = 0
    for least, choice in bounded:
        name = family_name(choice)
        if prune and _beaten(least, name, ranked, best, top):
            continue
        job = replace(base, **choice)
        if recompute_misfit(job.recompute, job.cut) or (legal is not None and not legal(job)):
            continue
        looked_at += 1
        if limits.recompute:

            def beaten(job: Job, name: str = name) -> bool:
                least = StepModel(job, cluster, cache=cache).predict().total
                return prune and _beaten(least, name, ranked, best, top)

            found = _frugal(job, cluster, limits, cache, beaten, wanted=name not in best)
            if found is None:
                continue
            job, memory = found
        else:
            memory = predict_memory(job)
        if verdict(memory, cluster, limits.margin) == "does not fit":
            if name not in smallest or memory.total < smallest[name][0]:
                smallest[name] = (memory.total, job)
            continue
        candidate = Candidate(job, cluster, limits.margin, memory, StepModel(job, cluster, cache=cache).predict())
        if name not in best or _rank(candidate) < _rank(best[name]):
            best[name] = candidate
        ranked.append(candidate)
        ranked.sort(key=_rank)
        del ranked[top:]
    for name, (_, job) in smallest.items():
        best.setdefault(name, evaluate(job, cluster, limits.margin, cache))
    return Found(tuple(ranked), best, looked_at, len(bounded))


def _bounded(base: Job, cluster: ClusterSpec, limits: Limits, cache: Cache) -> list[tuple[float, dict[str, Any]]]:
    """Every legal layout behind the seconds that it cannot undercut, the least first."""
    microbatch: dict[tuple[int, ...], float] = {}
    quantized, found = base.precision in ("fp8", "fp4"), []
    for choice in layouts(base, cluster, limits):
        key = (choice["tp"], choice["cp"], choice["ep"], choice["micro_batch"])
        if quantized:  # once for all microbatches
            key = (*key, choice["dp_replicate"] * choice["dp_shard"])
        if key not in microbatch:
            microbatch[key] = StepModel(replace(base, **choice), cluster, cache=cache).microbatch()
        found.append((_least(microbatch[key], base, choice), choice))
    return sorted(found, key=lambda entry: entry[0])


def _least(microbatch: float, base: Job, choice: dict[str, Any]) -> float:
    """Seconds that no arrangement of stages can undercut: all of them equally long, nothing exchanged between ranks.

    A stage longer than the others costs more than it saves in the bubble, for there are more microbatches than stages
    that wait.
    """
    pp, dp = choice["pp"], choice["dp_replicate"] * choice["dp_shard"]
    microbatches = base.global_batch // (dp * choice["micro_batch"])
    if pp == 1:
        return microbatch * microbatches
    share = schedule_waiting(choice["schedule"], pp, microbatches, choice["virtual_stages"]).share
    return microbatch / pp * (microbatches + (pp - 1) * min(share, microbatches))


def frugal(job: Job, cluster: ClusterSpec, margin: float = MARGIN) -> Job:
    """The same layout with the least recomputation that fits, else the least that is tight, else all of it."""
    found = _frugal(replace(job, recompute="none"), cluster, Limits(margin=margin), {}, lambda _: False, wanted=True)
    assert found is not None
    return found[0]


def _frugal(
    plain: Job, cluster: ClusterSpec, limits: Limits, cache: Cache, beaten: Callable[[Job], bool], *, wanted: bool
) -> tuple[Job, MemoryUse] | None:
    """The layout with the least recomputation that fits, else the least that is tight, else all of it; None where it
    is beaten even without, or where it does not fit and is not `wanted` then."""
    capacity = cluster.memory_gb * 1e9
    memory = predict_memory(plain, enough=capacity)
    if verdict(memory, cluster, limits.margin) == "fits":
        return plain, memory
    if memory.states > capacity and not wanted:  # which no recomputation mends
        return None
    everything = replace(plain, recompute="full")
    memory = predict_memory(everything, enough=inf if wanted else capacity)
    best = verdict(memory, cluster, limits.margin)
    if best == "does not fit":
        return everything, memory
    if beaten(plain):
        return None
    worst = VERDICTS.index(best)
    found = least_recompute(
        StepModel(plain, cluster, cache=cache),
        lambda use: VERDICTS.index(verdict(use, cluster, limits.margin)) <= worst,
        lambda part: beaten(replace(plain, recompute=part)),
    )
    if found is None:
        return None
    job = replace(plain, recompute=found)
    return job, predict_memory(job)


def _rank(candidate: Candidate) -> tuple[int, float, float]:
    """Fitting before tight; then fast; then frugal."""
    return VERDICTS.index(candidate.verdict), candidate.time.total, candidate.memory.total


def _beaten(least: float, name: str, ranked: list[Candidate], best: dict[str, Candidate], top: int) -> bool:
    """Whether a layout that takes at least so long can neither be among the top nor be its strategy's best."""
    bar = (0, least)
    return len(ranked) == top and bar > _rank(ranked[-1])[:2] and name in best and bar > _rank(best[name])[:2]


def layouts(base: Job, cluster: ClusterSpec, limits: Limits) -> Iterator[dict[str, Any]]:
    """Every legal layout of all devices with the microbatches that are open, as fields of a Job."""
    for degrees in _degrees(base, cluster.devices):
        for state in _states(degrees, cluster, limits):
            dp = state["dp_replicate"] * state["dp_shard"]
            for micro in _micro_batches(base, base.global_batch // dp, limits):
                microbatches = base.global_batch // dp // micro
                for schedule, virtual in _schedules(base, degrees["pp"], microbatches):
                    yield degrees | state | {"micro_batch": micro, "virtual_stages": virtual, "schedule": schedule}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _degrees(base: Job, devices: int) -> Iterator[dict[str, int]]:
    """tp, cp, pp and ep that heads, layers, experts, sequence and batch allow."""
    model = base.model
    for tp in divisors(devices):
        if (
            tp > MOST_TENSOR
            or model.num_heads % tp
            or not (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)
        ):
            continue
        for cp in divisors(devices // tp):
            if cp > 1 and (cp > MOST_CONTEXT or base.sequence // cp < SHORTEST_PART or base.sequence % (2 * cp * tp)):
                continue
            for pp in divisors(devices // tp // cp):
                dp = devices // tp // cp // pp
                if pp > min(MOST_STAGES, model.num_layers) or base.global_batch % dp:
                    continue
                for ep in _expert_degrees(base, dp * cp * tp):
                    yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep}


def _expert_degrees(base: Job, sharers: int) -> list[int]:
    experts = max(block.num_experts for block in base.model.kinds)
    if not experts:
        return [1]
    return [ep for ep in divisors(experts) if sharers % ep == 0]


def _states(degrees: dict[str, int], cluster: ClusterSpec, limits: Limits) -> Iterator[dict[str, Any]]:
    """How the data-parallel ranks share the state: not at all, all of them, or those within a node."""
    dp = cluster.devices // (degrees["tp"] * degrees["cp"] * degrees["pp"])
    inside = max(1, cluster.domain // (degrees["tp"] * degrees["cp"]))
    offloads = ["none", "cpu"] if limits.offload else ["none"]
    for offload in offloads:
        yield {"dp_replicate": dp, "dp_shard": 1, "zero": 0, "offload": offload}
        shards = [dp] if dp > 1 else []
        if 1 < inside < dp and dp % inside == 0:
            shards.append(inside)
        if degrees["cp"] > 1 and dp == 1:
            shards.append(1)  # context-parallel ranks share the state
        for shard in shards:
            if degrees["ep"] > shard * degrees["cp"] * degrees["tp"]:
                continue
            for zero in (1, 2, 3):
                yield {"dp_replicate": dp // shard, "dp_shard": shard, "zero": zero, "offload": offload}


def _micro_batches(base: Job, per_rank: int, limits: Limits) -> list[int]:
    if not limits.micro_batch:
        return [base.micro_batch] if per_rank % base.micro_batch == 0 else []
    return [size for size in divisors(per_rank) if size <= MOST_MICROBATCH and size & (size - 1) == 0]


def _schedules(base: Job, pp: int, microbatches: int) -> list[tuple[str, int]]:
    """(schedule, stages of a rank): what the job says, else 1F1B, interleaved, and those that split backward passes.

    Compiled blocks compute both parts of a backward pass at once, so they cannot be split.
    """
    if pp == 1:
        return [(base.schedule, 1)]
    if base.schedule != "1f1b":
        options = [(base.schedule, base.virtual_stages)]
    else:
        whole = [virtual for virtual in VIRTUAL_STAGES if base.model.num_layers % (pp * virtual) == 0]
        options = [("1f1b", 1), *(("interleaved-1f1b", virtual) for virtual in whole)]
        if pp <= MOST_SPLIT and not base.stack.fused:
            options += [("interleaved-zero-bubble", 1), ("zbv", 2)]
    return [
        (name, virtual)
        for name, virtual in options
        if base.model.num_layers >= pp * virtual and schedule_kind(name).problem(pp, virtual, microbatches) is None
    ]
