"""Blockwise quantization for collectives: symmetric, one fp32 scale per block of a row, rounded to nearest.

A block's largest magnitude becomes the largest code, so the error of a number is at most half a step: the block's
largest magnitude over 254 (int8) or over 14 (int4). One non-finite number makes its whole block non-finite.
"""

from dataclasses import dataclass, replace
from typing import assert_never

import torch

from meshwright.spec.pieces import PIECES
from meshwright.spec.quantized import SCALE_BYTES, Sent, levels, num_blocks


@dataclass(frozen=True)
class Coded:
    """The encoded parts, of equal size, one per row: a row's scales, then its codes."""

    rows: torch.Tensor
    """[rows, bytes], uint8; may be strided."""
    numbers: int
    """Numbers of a row."""
    sent: Sent
    row: int | None = None
    """Numbers of a row of the matrix, whose blocks are its own; None if all numbers are one."""

    @property
    def blocks(self) -> int:
        """Blocks of a part."""
        return num_blocks(self.numbers, self.row)

    def part(self, index: int) -> "Coded":
        """One of the parts."""
        return replace(self, rows=self.rows[index : index + 1])

    @property
    def scales(self) -> torch.Tensor:
        """A copy of the scales [rows, blocks], fp32."""
        end = self.blocks * SCALE_BYTES
        return self.rows[:, :end].clone(memory_format=torch.contiguous_format).view(torch.float32)

    def write(self, values_RN: torch.Tensor) -> None:
        """Encode [rows, numbers]; overwrites values in fp32 and fp64."""
        values_RN = values_RN.to(torch.promote_types(values_RN.dtype, torch.float32))
        end = self.blocks * SCALE_BYTES
        scales = torch.empty(len(values_RN), self.blocks, dtype=torch.float32, device=values_RN.device)
        for of_blocks, values in self._blocks(scales, values_RN):
            largest = torch.linalg.vector_norm(values, torch.inf, dim=-1).to(torch.float32).div_(levels(self.sent))
            of_blocks.copy_(largest)
            values.div_(largest.masked_fill_(largest == 0, 1).unsqueeze(-1)).round_()
        self.rows[:, :end].copy_(scales.view(torch.uint8))
        codes = self.rows[:, end:].view(torch.int8)
        match self.sent:
            case "int8":
                codes.copy_(values_RN)
            case "int4":
                halves = self.numbers // 2
                codes.copy_(values_RN[:, 0::2]).bitwise_and_(0xF)
                codes[:, :halves].bitwise_or_(values_RN[:, 1::2].to(torch.int8).bitwise_left_shift_(4))
            case "none" | "fp8":
                raise AssertionError(f"{self.sent} has no blocks")
            case _:
                assert_never(self.sent)

    def read(self, into_RN: torch.Tensor) -> None:
        """Decode into [rows, numbers] of any floating dtype."""
        end = self.blocks * SCALE_BYTES
        codes, scales = self.rows[:, end:].view(torch.int8), self.scales
        match self.sent:
            case "int8":
                into_RN.copy_(codes)
            case "int4":
                into_RN[:, 1::2].copy_(codes[:, : self.numbers // 2].bitwise_right_shift(4))
                into_RN[:, 0::2].copy_(codes.bitwise_left_shift(4).bitwise_right_shift_(4))
            case "none" | "fp8":
                raise AssertionError(f"{self.sent} has no blocks")
            case _:
                assert_never(self.sent)
        for of_blocks, values in self._blocks(scales, into_RN):
            values.mul_(of_blocks.unsqueeze(-1))

    def _blocks(self, scales: torch.Tensor, values_RN: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the scales and of the values of blocks: of the full ones, and of the last of each row if it is
        shorter."""
        row = self.row or self.numbers
        values, scales = values_RN.unflatten(1, (-1, row)), scales.unflatten(1, (self.numbers // row, -1))
        block = PIECES.get().block
        count, left = divmod(row, block)
        parts = []
        if count:
            parts.append((scales[..., :count], values[..., : count * block].unflatten(2, (count, block))))
        if left:
            parts.append((scales[..., count:], values[..., count * block :].unsqueeze(2)))
        return parts
