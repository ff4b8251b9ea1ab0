"""Weights and optimizer state in bf16: steps are computed in fp32, and their results are rounded.

Most updates are smaller than half the gap between neighbouring bf16 numbers, so rounding to nearest loses them. There
are two remedies (Zamirai et al., "Revisiting BFloat16 Training", 2021):

- stochastic: a number is rounded up or down at random, so that its expected value is exact;
- kahan: a second bf16 tensor holds the rounding error of the first, and both are read as one number.

Random bits are hashes of seed, step, tensor and the number's position in the whole tensor, as in dropout, so every
layout rounds the same way. With beta2 near 1, rounding to nearest would also stall second moments, so moments are
always rounded stochastically.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import assert_never

import torch

from meshwright.devices import of_kind
from meshwright.models.dropout import drawn_bits, hash_key
from meshwright.optim.shards import begin_of, local
from meshwright.spec.training import Rounding

COMPENSATION = "compensation"
"""The state with a bf16 weight's rounding error, under kahan."""

AT_ONCE = {"gpu": 2**24, "cpu": 2**18}
"""Numbers of a tensor that are cast to fp32 at a time, about eight copies of each; a GPU runs fastest with few
kernels."""

Rows = slice
"""Rows of this rank's part of a tensor as a matrix: all dims but the last are rows; a vector has rows of one number."""


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """How one optimizer keeps numbers in bf16."""

    rounding: Rounding = "nearest"
    """Of bf16 weights."""
    moments: bool = False
    """Whether moments are in bf16; else in fp32, or wider if the weights are."""
    seed: int = 0
    """The run's."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of parameters by id, for random bits."""

    def fresh(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The additional state for a parameter's own format, besides the optimizer's."""
        if parameter.dtype != torch.bfloat16 or self.rounding != "kahan":
            return {}
        return {COMPENSATION: torch.zeros_like(parameter)}

    def fresh_moment(self, parameter: torch.Tensor) -> torch.Tensor:
        """A moment before the first step: zeros, sharded like the parameter."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros_like(parameter, dtype=torch.bfloat16 if self.moments else wide)

    def parts(self, parameter: torch.Tensor) -> Iterator[Rows]:
        """This rank's rows of a parameter, at most `AT_ONCE` numbers at a time."""
        here = as_rows(parameter)
        rows = max(1, of_kind(AT_ONCE, here) // max(1, here.shape[1]))
        return (slice(start, min(start + rows, len(here))) for start in range(0, len(here), rows))

    def read(self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        """Weights in fp32, or unchanged if they are fp32 or wider."""
        here = widened(as_rows(parameter)[rows])
        return here + as_rows(state[COMPENSATION])[rows] if COMPENSATION in state else here

    def write(
        self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor], rows: Rows, weights: torch.Tensor, step: int
    ) -> None:
        """Store weights that were read and updated; `step` counts from 1."""
        here = as_rows(parameter)[rows]
        if here.dtype != torch.bfloat16:
            return  # they were updated in place
        match self.rounding:
            case "stochastic":
                here.copy_(self._rounded(weights, parameter, "weight", rows, step))
            case "nearest":
                here.copy_(weights)
            case "kahan":
                here.copy_(weights)
                as_rows(state[COMPENSATION])[rows] = weights - here
            case _:
                assert_never(self.rounding)

    def write_moment(
        self,
        parameter: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        key: str,
        rows: Rows,
        moment: torch.Tensor,
        step: int,
    ) -> None:
        """Store a moment that was read by `widened` and updated."""
        here = as_rows(state[key])[rows]
        if here.dtype == torch.bfloat16:
            here.copy_(self._rounded(moment, parameter, key, rows, step))

    def _rounded(self, values: torch.Tensor, parameter: torch.Tensor, use: str, rows: Rows, step: int) -> torch.Tensor:
        numbers_N, first = places(parameter)
        key = hash_key(self.seed, self.names.get(id(parameter), ""), use, step)
        return round_at_random(values, drawn_bits(key, numbers_N[rows], first, values.shape[1]))


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as a matrix; a view."""
    here = local(tensor)
    return here.view(-1, 1) if here.dim() < 2 else here.view(prod(here.shape[:-1]), here.shape[-1])


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or unchanged if it is fp32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def places(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The global number of each of this rank's rows, and the first column on this rank."""
    here, begin = local(parameter), begin_of(parameter)
    leading = max(1, here.dim() - 1)
    numbers = torch.zeros((1,) * leading, dtype=torch.int64, device=here.device)
    for dim in range(min(leading, here.dim())):
        index = torch.arange(begin[dim], begin[dim] + here.shape[dim], device=here.device)
        index = index * prod(parameter.shape[dim + 1 : leading])
        numbers = numbers + index.view(-1, *(1,) * (leading - 1 - dim))
    return numbers.flatten(), begin[-1] if here.dim() > 1 else 0


def round_at_random(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 numbers rounded stochastically up or down to bf16, with exact expected values; `bits`: random int32, of
    which the lowest 16 count. Numbers that bf16 represents stay unchanged."""
    moved = values.contiguous().view(torch.int32) + (bits & 0xFFFF)
    return (moved & -0x10000).view(torch.float32)
