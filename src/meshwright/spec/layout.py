"""Layouts: arrangements of ranks, and the rules of legal ones."""

from collections.abc import Iterable, Iterator
from math import gcd
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from meshwright.spec.asynchronous import layout_problems
from meshwright.spec.base import Spec
from meshwright.spec.errors import NEAREST, UserError
from meshwright.spec.offload import CPU, NOTHING, OffloadSpec
from meshwright.spec.problems import did_you_mean
from meshwright.spec.quantized import Sent
from meshwright.spec.schedule import SCHEDULES, Schedule, build_schedule, is_asynchronous

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which ranks are numbered, outermost first; `ep` is a second view of the ranks of `dp_shard x cp x tp`."""


ContextMethod = Literal["ring", "all_gather", "ulysses"]


class LayoutSpec(Spec):
    """Degrees of every axis, and the state that data-parallel ranks shard.

    `zero` follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020): 0
    replicates everything (DDP), 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
    """

    choose: bool = False
    """The planner decides everything below before the run; `layout: auto` is short for this."""
    pp: int = 1
    """Pipeline ranks: each holds some of the layers."""
    schedule: str = "1f1b"
    """Pipeline schedule: afab, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv, dualpipev; a file of
    your own whose name ends in .csv; or pipedream-2bw, whose gradients are one step late (docs/schedules.md)."""
    stages_per_rank: int | Literal["auto"] = "auto"
    """Pipeline stages that each rank holds. auto: 1, or the 2 that interleaved and V-shaped schedules usually have."""
    stage_layers: tuple[int, ...] | Literal["auto"] = "auto"
    """Layers of each pipeline stage, first to last. auto: minimizes the FLOPs of the heaviest stage, including the
    head."""
    dp_replicate: int = 1
    """Data-parallel groups that each hold a full copy: DDP, or the outer axis of hybrid sharding."""
    dp_shard: int = 1
    """Data-parallel ranks that share one copy: ZeRO-1, -2, -3 (FSDP)."""
    cp: int = 1
    """Context-parallel ranks that share every sequence."""
    cp_method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """Communication of context-parallel attention. ring: keys and values pass around a ring; all_gather: every rank
    gathers them all; ulysses: all-to-alls give each rank all tokens of some heads. auto: ulysses if the key and value
    heads divide over cp x tp, else ring."""
    tp: int = 1
    """Tensor-parallel ranks that share every matrix and, between matrices, every sequence."""
    ep: int = 1
    """Expert-parallel ranks that share every layer's experts: a regrouping of the ranks of dp_shard x cp x tp."""
    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    """State that `dp_shard` ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. auto: 3 if
    dp_shard > 1, else 0."""
    offload: Literal["none", "cpu"] | OffloadSpec = "none"
    """cpu: parameters, gradients and optimizer state are in host memory, and the optimizer steps there. Or a section
    that chooses per kind of state, such as `{optimizer: disk}`."""
    quantized_weights: Literal["none", "int8", "fp8"] = "none"
    """Format in which sharded weights are gathered. int8 (ZeRO++'s qwZ): matrices in one byte per number, with a scale
    for every 256 numbers. The gathered weights are rounded, the master weights are not. fp8: the codes that fp8 layers
    multiply anyway, so that results do not change; needs training.precision=fp8 with recipe tensorwise."""
    quantized_gradients: Literal["none", "int8", "int4"] = "none"
    """Format in which gradients are reduced (ZeRO++'s qgZ). int8, int4: gradients of matrices are quantized once, sent
    to the rank that keeps them and summed there. Across `dp_replicate` they are reduced in training.reduce_dtype."""
    gradient_error_feedback: bool = False
    """Whether each rank adds the error of a quantized reduction to its next gradient, so that errors do not add up
    (Seide et al., 2014); under int4 it also sends the gradients of embeddings and head in int8. Costs about one byte of
    memory on every rank for each parameter that it computes with."""

    @field_validator("zero", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python, and so pydantic, treats it as 0 or 1
            raise UserError(f"{str(value).lower()} is not allowed: must be 'auto', 0, 1, 2 or 3")
        return value

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _legal(self) -> "LayoutSpec":
        if problem := self.problem:
            raise UserError(problem)
        return self

    @property
    def problem(self) -> str | None:
        """The reason why the layout is illegal, which `model_copy` does not check; None if it is legal."""
        return "; ".join(self._problems()) or None

    def _problems(self) -> Iterator[str]:
        if self.choose and self.model_dump() != LayoutSpec().model_dump() | {"choose": True}:
            yield "layout: auto lets the planner decide every degree; remove the others, or auto"
            return
        senseless = [axis for axis in (*AXES, "ep") if getattr(self, axis) < 1]
        for axis in senseless:
            yield f"{axis}={getattr(self, axis)}: a degree is at least 1"
        if senseless:
            return
        yield from self._pipeline_problems()
        if self.zero == 0 and self.dp_shard > 1:
            yield (
                f"zero=0 with dp_shard={self.dp_shard}: zero=0 replicates everything on every rank; {NEAREST} "
                f"dp_replicate={self.data_parallel}, dp_shard=1, zero=0"
            )
        sharers = self.dp_shard * self.cp * self.tp
        if sharers % self.ep:
            unit = self.ep // gcd(self.ep, self.cp * self.tp)
            kept = f", or with ep={self.ep} dp_shard={-(-self.dp_shard // unit) * unit}" if self.zero != 0 else ""
            yield (
                f"ep={self.ep} does not divide dp_shard x cp x tp = {sharers}, the ranks that share the experts; "
                f"{NEAREST} ep={gcd(self.ep, sharers)}{kept}"
            )
        if self.zero in (1, 2, 3) and self.dp_shard * self.cp == 1:
            alone = "zero=0 (one rank has nothing to shard)"
            sharded = f"dp_replicate=1, dp_shard={self.dp_replicate}, zero={self.zero}"
            yield (
                f"zero={self.zero} with dp_shard=1: there is no axis to shard over; {NEAREST} "
                f"{sharded if self.dp_replicate > 1 else alone}"
            )

        yield from self._quantized_problems()

    def _quantized_problems(self) -> Iterator[str]:
        for field, what in (("quantized_weights", "gathers weights"), ("quantized_gradients", "scatters gradients")):
            value = getattr(self, field)
            if value != "none" and self.shard == 1:
                yield (
                    f"{field}={value} with zero={self.zero_stage} and dp_shard={self.dp_shard}: no rank {what}; "
                    f"{NEAREST} {field}=none, or with {field}={value} dp_shard=2, zero=3"
                )
        if self.gradient_error_feedback and self.quantized_gradients == "none":
            yield (
                "gradient_error_feedback=true with quantized_gradients=none: no gradient is rounded; set "
                "quantized_gradients, or leave gradient_error_feedback out"
            )

    def _pipeline_problems(self) -> Iterator[str]:
        given = {"stages_per_rank": self.stages_per_rank, "stage_layers": self.stage_layers}
        for field, value in given.items():
            if self.pp == 1 and value != "auto":
                yield f"{field}={value} with pp=1: there is no pipeline; set pp, or leave {field} out"
        per_rank = None if self.stages_per_rank == "auto" else self.stages_per_rank
        if per_rank is not None and per_rank < 1:
            yield f"stages_per_rank={per_rank}: a rank has at least 1"
            return
        if not self.schedule.endswith(".csv"):
            if self.schedule not in SCHEDULES:
                hint = did_you_mean(self.schedule, SCHEDULES)
                yield f"schedule={self.schedule}: known are {', '.join(SCHEDULES)}, or the name of a .csv file{hint}"
                return
            kind = SCHEDULES[self.schedule]
            per_rank = kind.stages_per_rank if kind.fixed and per_rank is None else per_rank
            if kind.fixed and per_rank != kind.stages_per_rank:
                yield f"stages_per_rank={per_rank}: schedule {self.schedule} has exactly {kind.stages_per_rank}"
            if kind.asynchronous:
                yield from layout_problems(self)
        if self.stage_layers != "auto":
            if min(self.stage_layers, default=0) < 1:
                yield f"stage_layers={list(self.stage_layers)}: every stage has at least one layer"
            if len(self.stage_layers) % self.pp or (per_rank and len(self.stage_layers) != per_rank * self.pp):
                yield (
                    f"stage_layers={list(self.stage_layers)} has {len(self.stage_layers)} stages, "
                    f"but pp={self.pp} ranks have {f'{per_rank} each' if per_rank else 'equally many each'}"
                )

    @property
    def tiers(self) -> OffloadSpec:
        """The section that `offload` means."""
        return self.offload if isinstance(self.offload, OffloadSpec) else CPU if self.offload == "cpu" else NOTHING

    @property
    def alone(self) -> bool:
        """Whether one process trains without FSDP2, which is needed to move parameters to host memory and back."""
        return self.world_size == 1 and self.tiers.parameters != "host"

    @property
    def offload_word(self) -> str:
        """`offload` as written in a recipe."""
        if not isinstance(self.offload, OffloadSpec):
            return self.offload
        given = self.offload.model_dump(exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}"

    @property
    def asynchronous(self) -> bool:
        """Whether the pipeline schedule applies gradients one step late, so that training differs from one process."""
        return self.pp > 1 and is_asynchronous(self.schedule)

    @property
    def world_size(self) -> int:
        """Number of ranks, one process each."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def replicate(self) -> int:
        """Number of data- and context-parallel ranks that hold the same share of the model state."""
        return self.dp_replicate * (self.cp if self.zero_stage == 0 else 1)

    @property
    def shard(self) -> int:
        """Number of data- and context-parallel ranks over which ZeRO shards the model state."""
        return self.dp_shard * (1 if self.zero_stage == 0 else self.cp)

    @property
    def expert_replicate(self) -> int:
        """Number of ranks that hold the same share of the experts' state."""
        return self.world_size // (self.pp * self.ep * self.expert_shard)

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which ZeRO shards the state of the same experts."""
        return 1 if self.zero_stage == 0 else self.dp_shard * self.cp * self.tp // self.ep

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage with `auto` resolved."""
        return (3 if self.dp_shard > 1 else 0) if self.zero == "auto" else self.zero

    def gradient_format(self, dims: Iterable[str]) -> Sent:
        """The format in which the gradient of a matrix with these dims is reduced.

        Under int4 with error feedback, gradients of embeddings and head are in int8, because in int4 they cost most of
        the loss that error feedback leaves (docs/strategies.md).
        """
        wide = self.quantized_gradients == "int4" and self.gradient_error_feedback and "vocab" in dims
        return "int8" if wide else self.quantized_gradients

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages on each rank, with `auto` resolved; 1 for a schedule from a file."""
        if self.pp == 1 or self.schedule.endswith(".csv"):
            return 1
        if self.stage_layers != "auto":
            return len(self.stage_layers) // self.pp
        return SCHEDULES[self.schedule].stages_per_rank if self.stages_per_rank == "auto" else self.stages_per_rank

    def pipeline_schedule(self, *, microbatches: int, base_dir: Path) -> Schedule:
        """The actions of the pipeline's ranks in a step; a file's path is relative to `base_dir`.

        Raises `ScheduleError` if the schedule does not work with this many microbatches.
        """
        own = self.schedule.endswith(".csv")
        per_rank = None if self.stages_per_rank == "auto" else self.stages_per_rank
        if self.stage_layers != "auto":
            per_rank = len(self.stage_layers) // self.pp
        name = str(base_dir / self.schedule) if own else self.schedule
        return build_schedule(name, ranks=self.pp, microbatches=microbatches, stages_per_rank=per_rank)

    @property
    def strategy(self) -> str:
        """The usual name of the layout, for people."""
        if self.world_size == 1:
            name = "single process"
        elif self.data_parallel == 1 and self.zero_stage == 0:
            name = ""
        elif self.zero_stage == 0:
            name = f"DDP x {self.dp_replicate}"
        elif self.data_parallel == 1:
            name = f"ZeRO-{self.zero_stage}"
        elif self.dp_replicate == 1:
            name = f"ZeRO-{self.zero_stage} x {self.dp_shard}"
        else:
            name = f"hybrid ZeRO-{self.zero_stage}: {self.dp_replicate} replicas x {self.dp_shard} shards"
        fed_back = " with error feedback" if self.gradient_error_feedback else ""
        parts = [
            f"pipeline x {self.pp} ({self.schedule})" if self.pp > 1 else "",
            name,
            f"tensor parallel x {self.tp}" if self.tp > 1 else "",
            f"context parallel x {self.cp}" if self.cp > 1 else "",
            f"expert parallel x {self.ep}" if self.ep > 1 else "",
            self.tiers.words,
            f"weights gathered in {self.quantized_weights}" if self.quantized_weights != "none" else "",
            f"gradients reduced in {self.quantized_gradients}{fed_back}" if self.quantized_gradients != "none" else "",
        ]
        return " + ".join(part for part in parts if part)
