"""Every legal layout of a job on a cluster: degrees, ZeRO stages, microbatches, schedules and offloading."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.predict.candidate import MARGIN
from meshwright.predict.changes import Change
from meshwright.predict.job import Job
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.offload import OffloadSpec
from meshwright.spec.schedule import schedule_kind

MOST_TENSOR = 16
MOST_CONTEXT = 64
MOST_STAGES = 64
MOST_MICROBATCH = 16
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8)
MOST_SPLIT = 16
"""Largest degrees in published runs (context: Llama 3 on 128k tokens; stages: Megatron's trillion)."""
SHORTEST_PART = 1024
"""Tokens of a sequence below which context parallelism is not tried."""


@dataclass(frozen=True)
class SearchLimits:
    """The freedom of a search."""

    margin: float = MARGIN
    offload: bool = True
    """Whether state may live in host memory."""
    change: Change | None = None
    """Settings that every layout has."""
    recompute: bool = True
    """Whether the recomputation policy is open."""
    micro_batch: bool = True
    """Whether the microbatch is open."""
    methods: bool = True
    """Whether a plan also searches the best layout of each fine-tuning method."""
    degrees: tuple[int, int, int, int] | None = None
    """The only degrees of tp, cp, pp and ep that layouts have; None: any."""
    runs: Callable[[Job], bool] = lambda job: True
    """Whether the engine can run a layout: the chosen layout is one that it can."""


def layouts(base: Job, cluster: ClusterSpec, limits: SearchLimits) -> Iterator[tuple[LayoutSpec, int]]:
    """Every legal layout of all devices, with each allowed microbatch."""
    fixed = limits.change.layout if limits.change else {}
    plain = LayoutSpec().model_copy(update=fixed)
    for degrees in _degrees(base, cluster.devices):
        if limits.degrees not in (None, tuple(degrees.values())):
            continue
        for state in _states(degrees, cluster, limits, fixed):
            if fixed and plain.model_copy(update=degrees | state).problem:
                continue
            made: dict[tuple[str, int], LayoutSpec] = {}
            dp = state["dp_replicate"] * state["dp_shard"]
            for micro in _micro_batches(base, base.global_batch // dp, limits):
                microbatches = base.global_batch // dp // micro
                for schedule, virtual in _schedules(base, degrees["pp"], microbatches):
                    if (schedule, virtual) not in made:
                        fields = {"schedule": schedule, "stages_per_rank": virtual} if degrees["pp"] > 1 else {}
                        made[schedule, virtual] = plain.model_copy(update=degrees | state | fields)
                    yield made[schedule, virtual], micro


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


def _states(
    degrees: dict[str, int], cluster: ClusterSpec, limits: SearchLimits, fixed: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """How data-parallel ranks shard the state: not at all, over all of them, or within a node."""
    dp = cluster.devices // (degrees["tp"] * degrees["cp"] * degrees["pp"])
    inside = max(1, cluster.domain // (degrees["tp"] * degrees["cp"]))
    # On a CPU the host's memory is the device's.
    offloads: list[str | OffloadSpec] = ["none", "cpu"] if limits.offload and cluster.device != "cpu" else ["none"]
    for offload in [fixed["offload"]] if "offload" in fixed else offloads:
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


def _micro_batches(base: Job, per_rank: int, limits: SearchLimits) -> list[int]:
    if not limits.micro_batch:
        return [base.micro_batch] if per_rank % base.micro_batch == 0 else []
    return [size for size in divisors(per_rank) if size <= MOST_MICROBATCH and size & (size - 1) == 0]


def _schedules(base: Job, pp: int, microbatches: int) -> list[tuple[str, int]]:
    """(schedule, stages of a rank): the job's, else 1F1B, interleaved, and schedules that split backward passes.

    Compiled blocks compute both parts of a backward pass at once, so they cannot be split.
    """
    if pp == 1:
        return [("1f1b", 1)]
    if base.layout.schedule != "1f1b":
        options = [(base.layout.schedule, base.layout.virtual_stages)]
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
