"""The one place that says how ranks are arranged and which arrangements are legal."""

from collections.abc import Iterator
from math import gcd
from typing import Any, Literal

from pydantic import field_validator, model_validator

from meshwright.spec.base import Spec

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which ranks are numbered, outermost first; `ep` is a second view of the ranks of `dp_shard x cp x tp`."""

PLANNED_AXES = {
    "pp": "pipeline parallelism",
}

NEAREST = "the nearest legal layout is"

ContextMethod = Literal["ring", "all_gather", "ulysses"]


class LayoutSpec(Spec):
    """Degrees of every axis and what the data-parallel ranks keep.

    `zero` follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020):
    0 replicates everything (DDP), 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
    """

    pp: int = 1
    """Pipeline stages. Only 1 in this version."""
    dp_replicate: int = 1
    """Data-parallel groups that each hold a full copy: DDP, or the outer axis of hybrid sharding."""
    dp_shard: int = 1
    """Data-parallel ranks that share one copy: ZeRO-1, -2, -3 (FSDP)."""
    cp: int = 1
    """Context-parallel ranks that share every sequence."""
    cp_method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """How context-parallel ranks attend to each other's tokens. ring: keys and values go round; all_gather: every rank
    gets all of them; ulysses: all tokens of a share of the heads. auto: ulysses where the key and value heads divide
    over cp x tp, else ring."""
    tp: int = 1
    """Tensor-parallel ranks that share every matrix and, between matrices, every sequence."""
    ep: int = 1
    """Expert-parallel ranks that share every layer's experts: a second view of the ranks of dp_shard x cp x tp."""
    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    """What `dp_shard` ranks split: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
    auto: 3 where dp_shard > 1, else 0."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: parameters, gradients and optimizer state live in host memory and the optimizer steps there."""

    @field_validator("zero", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which Python, and so pydantic, takes for 0 or 1
            raise ValueError(f"{str(value).lower()} is not allowed: must be 'auto', 0, 1, 2 or 3")
        return value

    @model_validator(mode="after")
    def _legal(self) -> "LayoutSpec":
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        senseless = [axis for axis in (*AXES, "ep") if getattr(self, axis) < 1]
        for axis in senseless:
            yield f"{axis}={getattr(self, axis)}: a degree is at least 1"
        if senseless:
            return
        for axis, name in PLANNED_AXES.items():
            if getattr(self, axis) > 1:
                shards = self.world_size // self.dp_replicate
                yield (
                    f"{axis}={getattr(self, axis)}: {name} is not in this version; {NEAREST} "
                    f"dp_replicate={self.dp_replicate}, dp_shard={shards}"
                )
        if self.zero == 0 and self.dp_shard > 1:
            yield (
                f"zero=0 with dp_shard={self.dp_shard}: zero 0 keeps a full copy on every rank, so nothing is sharded; "
                f"{NEAREST} dp_replicate={self.data_parallel}, dp_shard=1, zero=0"
            )
        sharers = self.dp_shard * self.cp * self.tp
        if sharers % self.ep:
            yield (
                f"ep={self.ep} does not divide dp_shard x cp x tp = {sharers}, the ranks that share the experts; "
                f"{NEAREST} ep={gcd(self.ep, sharers)}"
            )
        if self.zero in (1, 2, 3) and self.dp_shard * self.cp == 1:
            alone = "zero=0 (one rank has nothing to share)"
            sharded = f"dp_replicate=1, dp_shard={self.dp_replicate}, zero={self.zero}"
            yield (
                f"zero={self.zero} with dp_shard=1: there is no axis to shard over; {NEAREST} "
                f"{sharded if self.dp_replicate > 1 else alone}"
            )

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
        """Ranks that hold copies of the same share of the model state: data- and context-parallel ones."""
        return self.dp_replicate * (self.cp if self.zero_stage == 0 else 1)

    @property
    def shard(self) -> int:
        """Ranks among which ZeRO splits the model state: data- and context-parallel ones."""
        return self.dp_shard * (1 if self.zero_stage == 0 else self.cp)

    @property
    def expert_replicate(self) -> int:
        """Ranks that hold copies of the same share of the experts' state."""
        return self.world_size // (self.pp * self.ep * self.expert_shard)

    @property
    def expert_shard(self) -> int:
        """Ranks among which ZeRO splits the state of the same experts."""
        return 1 if self.zero_stage == 0 else self.dp_shard * self.cp * self.tp // self.ep

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage with `auto` resolved."""
        return (3 if self.dp_shard > 1 else 0) if self.zero == "auto" else self.zero

    @property
    def strategy(self) -> str:
        """The field's name for this layout, for people."""
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
        parts = [
            name,
            f"tensor parallel x {self.tp}" if self.tp > 1 else "",
            f"context parallel x {self.cp}" if self.cp > 1 else "",
            f"expert parallel x {self.ep}" if self.ep > 1 else "",
            "CPU offload" if self.offload == "cpu" else "",
        ]
        return " + ".join(part for part in parts if part)
