"""ZeRO++'s quantized collectives for FSDP2: weights gathered in int8 (qwZ), gradients reduced in int8 or int4 (qgZ).

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023). FSDP2 accepts a
custom gather and a custom reduction for each group of parameters (`FSDPModule.set_custom_all_gather`,
`set_custom_reduce_scatter`). The gather sends each rank's part as codes and scales. Every rank, the owner included,
computes with the decoded weights, so all ranks have the same weights. The reduction quantizes each rank's gradient
once, sends every rank its part in one all-to-all, and sums the decoded parts in rank order, in fp32 or wider.

Quantization blocks never span two tensors. Master weights, and so checkpoints, are not quantized.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.collectives import all_gather, all_to_all
from meshwright.comm.quantize import Coded
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.quantized import BITS, BLOCK, Sent, sent_bytes
from meshwright.torch_internals import FsdpAllGather, FsdpReduceScatter, grouped_parts


@dataclass(frozen=True)
class Piece:
    """A parameter's part on a rank, one of those sent together."""

    name: str
    numbers: int
    """Equal on every rank, because FSDP2 pads."""
    matrix: bool


class _Comm:
    """The layout of the bytes on the wire, for gather and reduction."""

    def __init__(self, pieces: Sequence[Piece], sent: Sent) -> None:
        self.pieces = tuple(pieces)
        self.sent: Sent = sent

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP2's input or output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _bytes(self, width: int) -> int:
        """Bytes that a rank sends for its part."""
        return sum(sent_bytes(piece.numbers, self.sent, width, matrix=piece.matrix) for piece in self.pieces)

    def _parts(
        self, values_RN: torch.Tensor, bytes_RB: torch.Tensor
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """Every piece with its columns of values and of bytes."""
        numbers = size = 0
        for piece in self.pieces:
            count = sent_bytes(piece.numbers, self.sent, values_RN.element_size(), matrix=piece.matrix)
            yield piece, values_RN[:, numbers : numbers + piece.numbers], bytes_RB[:, size : size + count]
            numbers, size = numbers + piece.numbers, size + count

    def _write(self, values_RN: torch.Tensor, bytes_RB: torch.Tensor) -> None:
        for piece, values, coded in self._parts(values_RN, bytes_RB):
            if piece.matrix:
                Coded(coded, piece.numbers, self.sent).write(values)
            else:
                coded.copy_(values.contiguous().view(torch.uint8))


class QuantizedAllGather(_Comm, FsdpAllGather):
    """FSDP2's gather of weights; matrices are sent as codes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill the output with the ranks' inputs, one after another."""
        size, rows = self._bytes(input_tensor.element_size()), group.size()
        here = torch.empty(1, size, dtype=torch.uint8, device=input_tensor.device)
        self._write(input_tensor.view(1, -1), here)
        everywhere = all_gather(here, group)
        for piece, values, coded in self._parts(output_tensor.view(rows, -1), everywhere):
            if piece.matrix:
                Coded(coded, piece.numbers, self.sent).read(values)
            else:
                values.copy_(_as_numbers(coded, values.dtype))


@dataclass
class Rounding:
    """The largest rounding errors that quantization can have caused in gradients since the last reset."""

    most: dict[str, torch.Tensor] = field(default_factory=dict)
    """By parameter: half a quantization step of each rank, summed over ranks and reductions; the largest in the
    tensor."""
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """The norm of the same over all numbers."""

    def add(self, piece: Piece, scales_RB: torch.Tensor) -> None:
        """Count a reduction, from the scales of all ranks."""
        half, name = scales_RB.sum(0) / 2, piece.name
        self.most[name] = self.most.get(name, 0) + half.max()
        self.norms[name] = self.norms.get(name, 0) + half.norm() * min(BLOCK, piece.numbers) ** 0.5


class QuantizedReduceScatter(_Comm, FsdpReduceScatter):
    """FSDP2's reduction of gradients; matrices' gradients are sent as codes."""

    def __init__(self, pieces: Sequence[Piece], sent: Sent) -> None:
        super().__init__(pieces, sent)
        self.rounding: Rounding | None = None
        """Filled if a proof sets one."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill the output with the sum of this rank's parts; overwrites the input."""
        rows = group.size()
        if output_tensor.numel() != sum(piece.numbers for piece in self.pieces):
            raise UserError(
                f"layout.quantized_gradients={self.sent}: some parameter that is reduced with {self.pieces[0].name} "
                "has no gradient after a backward pass; use layout.quantized_gradients=none"
            )
        sent = torch.empty(
            rows, self._bytes(input_tensor.element_size()), dtype=torch.uint8, device=input_tensor.device
        )
        self._write(input_tensor.view(rows, -1), sent)
        received = all_to_all(sent, group)
        wide = torch.promote_types(output_tensor.dtype, torch.float32)
        for piece, values, coded in self._parts(output_tensor.view(1, -1), received):
            total = torch.zeros(1, piece.numbers, dtype=wide, device=values.device)
            for row in coded.split(1):
                if piece.matrix:
                    one = torch.empty_like(total)
                    Coded(row, piece.numbers, self.sent).read(one)
                    total.add_(one)
                else:
                    total.add_(_as_numbers(row, values.dtype))
            values.copy_(total)
            if piece.matrix and self.rounding is not None:
                self.rounding.add(piece, Coded(coded, piece.numbers, self.sent).scales)


_REDUCTIONS: WeakKeyDictionary[nn.Module, QuantizedReduceScatter] = WeakKeyDictionary()


def reductions(model: nn.Module) -> list[QuantizedReduceScatter]:
    """The quantized reductions of a model's gradients on this rank."""
    return [_REDUCTIONS[module] for module in model.modules() if module in _REDUCTIONS]


def _as_numbers(bytes_RB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of rows of bytes, reinterpreted as numbers."""
    return bytes_RB.clone(memory_format=torch.contiguous_format).view(dtype)


def apply_quantized(model: nn.Module, layout: LayoutSpec) -> None:
    """Set the layout's quantized collectives in every group of parameters that FSDP2 gathers and reduces together."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        parts = [
            (Piece(names[id(parameter)], numbers, parameter.dim() >= 2), parameter.requires_grad)
            for parameter, numbers in grouped_parts(module)
        ]
        trained = [piece for piece, trains in parts if trains]
        if layout.quantized_weights in BITS and parts:
            module.set_custom_all_gather(QuantizedAllGather([piece for piece, _ in parts], layout.quantized_weights))
        if layout.quantized_gradients != "none" and trained:
            _REDUCTIONS[module] = QuantizedReduceScatter(trained, layout.quantized_gradients)
            module.set_custom_reduce_scatter(_REDUCTIONS[module])
