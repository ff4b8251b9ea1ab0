"""A layout with its costs: memory, time, whether it fits, and its name."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.predict.changes import Change
from meshwright.predict.interval import PredictionInterval, memory_sigma, time_sigma
from meshwright.predict.job import Job
from meshwright.predict.memory import MemoryUse, predict_memory
from meshwright.predict.step_time import StepModel, StepTime
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "does not fit")
AXES = ("pp", "tp", "cp", "ep")
"""Axes that split the model or its sequences."""
MARGIN = 0.1
"""Part of a device's memory that a plan leaves free by default."""
TIGHT = 2.0
"""Factor on a tight layout's step time in the ranking: it may run out of memory, so it has to be twice as fast."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its costs."""

    job: Job
    cluster: ClusterSpec
    margin: float
    memory: MemoryUse
    time: StepTime
    change: Change | None = None
    """Settings that differ from the recipe's, beside those that every search decides."""

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.cluster.memory_gb * 1e9

    @property
    def verdict(self) -> Verdict:
        """`fits` with the margin left free; `tight` without it: memory's range then exceeds the device."""
        return verdict(self.memory, self.cluster, self.margin)

    @cached_property
    def cost(self) -> float:
        """Seconds of a step, times `TIGHT` for a tight layout; layouts are ranked by it."""
        return self.time.total * (TIGHT if self.verdict == "tight" else 1.0)

    @property
    def host_bytes(self) -> float:
        """Bytes that offloading takes of a node's own memory."""
        return self.memory.host * self.cluster.per_node

    @property
    def seconds(self) -> PredictionInterval:
        """Seconds of a step."""
        return PredictionInterval.spread(self.time.total, time_sigma(self.time, self.job, self.cluster))

    @property
    def memory_bytes(self) -> PredictionInterval:
        """Bytes of the rank with the highest use."""
        return PredictionInterval.spread(self.memory.total, memory_sigma(self.memory, self.job))

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and device."""
        return self.job.global_batch * self.job.sequence / self.time.total / self.cluster.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, relative to the datasheet's rate in the job's precision."""
        peak = self.cluster.peak(self.job.precision)
        return self.tokens_per_second * self.job.flops_per_token / (peak * 1e12)

    @property
    def complexity(self) -> int:
        """The layout's complexity, and a point for each changed setting."""
        return complexity(self.job.layout) + (len(self.change.settings) if self.change else 0)

    @cached_property
    def strategy(self) -> str:
        """The layout's usual name."""
        name = strategy_name(self.job)
        training = self.change.training if self.change else ()
        return ", ".join((name, *(setting.removeprefix("training.") for setting in training)))


def verdict(memory: MemoryUse, cluster: ClusterSpec, margin: float) -> Verdict:
    """Whether a rank's memory fits a device with a share left free, and a node's ranks fit their host."""
    capacity = cluster.memory_gb * 1e9
    if memory.host * cluster.per_node > (1 - margin) * cluster.host_memory_gb * 1e9:
        return "does not fit"
    if memory.total <= (1 - margin) * capacity:
        return "fits"
    return "tight" if memory.total <= capacity else "does not fit"


def strategy_name(job: Job) -> str:
    """`ZeRO-3`, `hybrid ZeRO-3`, `TP + ZeRO-1`, `PP + TP + DDP` and so on."""
    layout = job.layout
    if layout.zero_stage == 0 or job.shards == 1:
        state = "DDP" if layout.data_parallel > 1 else ""
    else:
        state = _zero_name(layout)
    name = " + ".join([*_split_axes(layout), *([state] if state else [])]) or "one device"
    return f"{name} + {layout.tiers.words}" if layout.tiers.words else name


def family_name(layout: LayoutSpec) -> str:
    """The strategy that a layout is compared as: offloading, the axes that split the model, or its data parallelism."""
    if layout.offload != "none":
        return layout.tiers.words
    if axes := _split_axes(layout):
        return " + ".join(axes)
    if layout.data_parallel == 1:
        return "one device"
    return "DDP" if layout.zero_stage == 0 else _zero_name(layout)


def _split_axes(layout: LayoutSpec) -> list[str]:
    return [axis.upper() for axis in AXES if getattr(layout, axis) > 1]


def _zero_name(layout: LayoutSpec) -> str:
    return f"{'hybrid ' if layout.dp_replicate > 1 else ''}ZeRO-{layout.zero_stage}"


def complexity(layout: LayoutSpec) -> int:
    """The number of ways in which a layout splits the work; of equally fast layouts the simplest is chosen."""
    degrees = (layout.pp, layout.tp, layout.cp, layout.ep, layout.virtual_stages, layout.dp_replicate)
    other_schedule = layout.pp > 1 and layout.schedule != "1f1b"
    return sum(degree > 1 for degree in degrees) + other_schedule + (layout.offload != "none")


def evaluate(job: Job, cluster: ClusterSpec, margin: float = MARGIN) -> Candidate:
    """The costs of one layout."""
    return Candidate(job, cluster, margin, predict_memory(job), StepModel(job, cluster).predict())
