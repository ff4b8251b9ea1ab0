"""ZeRO++'s quantized collectives for FSDP2: weights gathered in int8 (qwZ), gradients reduced in int8 or int4 (qgZ).

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023). FSDP2 accepts a
custom gather and a custom reduction for each group of parameters (`FSDPModule.set_custom_all_gather`,
`set_custom_reduce_scatter`). The gather sends each rank's part as codes and scales. Every rank, the owner included,
computes with the decoded weights, so all ranks have the same weights. The reduction quantizes each rank's gradient
once, sends every rank its part in one all-to-all, and sums the decoded parts in rank order, in fp32 or wider.

Quantization blocks never span two tensors, nor two rows of a matrix. Master weights, and so checkpoints, are not
quantized.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_gather, all_to_all
from meshwright.comm.quantize import Coded
from meshwright.models import Decoder
from meshwright.parallel.error_feedback import ErrorFeedback, KeptErrors
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.pieces import PIECES
from meshwright.spec.quantized import BITS, KEPT, Sent, SentPart, levels
from meshwright.torch_internals import FsdpAllGather, FsdpReduceScatter, grouped_parts


class _Comm:
    """The layout of the bytes on the wire, for gather and reduction."""

    def __init__(self, pieces: Sequence[SentPart]) -> None:
        self.pieces = tuple(pieces)

    def _bytes(self, width: int) -> int:
        """Bytes that a rank sends for its part."""
        return sum(piece.sent_bytes(width) for piece in self.pieces)

    def _parts(
        self, values_RN: torch.Tensor, bytes_RB: torch.Tensor
    ) -> Iterator[tuple[SentPart, torch.Tensor, torch.Tensor]]:
        """Every piece with its columns of values and of bytes."""
        numbers = size = 0
        for piece in self.pieces:
            count = piece.sent_bytes(values_RN.element_size())
            yield piece, values_RN[:, numbers : numbers + piece.numbers], bytes_RB[:, size : size + count]
            numbers, size = numbers + piece.numbers, size + count

    def _coded(self, piece: SentPart, rows: torch.Tensor) -> Coded:
        return Coded(rows, piece.numbers, piece.sent, piece.row)

    def _write(self, values_RN: torch.Tensor, bytes_RB: torch.Tensor, kept: KeptErrors | None = None) -> None:
        for piece, values, coded in self._parts(values_RN, bytes_RB):
            if not piece.matrix:
                coded.copy_(values.contiguous().view(torch.uint8))
            elif kept is None:
                self._coded(piece, coded).write(values)
            else:
                kept.write(piece, values, self._coded(piece, coded))


class QuantizedAllGather(_Comm, FsdpAllGather):
    """FSDP2's gather of weights; matrices are sent as codes."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output with the ranks' inputs, one after another."""
        size, rows = self._bytes(input_tensor.element_size()), group.size()
        here = torch.empty(1, size, dtype=torch.uint8, device=input_tensor.device)
        self._write(input_tensor.view(1, -1), here)
        everywhere = all_gather(here, group)
        for piece, values, coded in self._parts(output_tensor.view(rows, -1), everywhere):
            if piece.matrix:
                self._coded(piece, coded).read(values)
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

    def add(self, piece: SentPart, half_B: torch.Tensor) -> None:
        """Count a reduction, from half a step of each block, summed over ranks."""
        self.most[piece.name] = self.most.get(piece.name, 0) + half_B.max()
        self.norms[piece.name] = (
            self.norms.get(piece.name, 0) + half_B.norm() * min(PIECES.get().block, piece.row) ** 0.5
        )

    def add_fed_back(self, piece: SentPart, half_B: torch.Tensor, before_B: torch.Tensor | None) -> None:
        """The same with error feedback. Of all reductions together only the errors from before the first and after the
        last remain, and the rounding of every error that was kept; `before_B`: half the steps of the previous one."""
        repaid = piece.name in self.most
        self.add(piece, half_B * (1 + 0.5 / levels(KEPT)))
        if before_B is not None:
            carried = Rounding()
            carried.add(piece, before_B)
            self.most[piece.name] += carried.most[piece.name] * (-1 if repaid else 1)
            self.norms[piece.name] += carried.norms[piece.name] * (-1 if repaid else 1)


class QuantizedReduceScatter(_Comm, FsdpReduceScatter):
    """FSDP2's reduction of gradients; matrices' gradients are sent as codes."""

    def __init__(self, pieces: Sequence[SentPart], kept: KeptErrors | None = None) -> None:
        super().__init__(pieces)
        self.kept = kept
        """Errors to add; None without error feedback."""
        self.rounding: Rounding | None = None
        """Filled if a proof sets one."""
        self._half_steps: dict[str, torch.Tensor] = {}
        """Of the errors that ranks keep: by matrix half the steps of its last reduction, if a proof set `rounding`."""

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
                f"layout.quantized_gradients: some parameter that is reduced with {self.pieces[0].name} has no "
                "gradient after a backward pass; use layout.quantized_gradients=none"
            )
        sent = torch.empty(
            rows, self._bytes(input_tensor.element_size()), dtype=torch.uint8, device=input_tensor.device
        )
        self._write(input_tensor.view(rows, -1), sent, self.kept)
        received = all_to_all(sent, group)
        wide = torch.promote_types(output_tensor.dtype, torch.float32)
        for piece, values, coded in self._parts(output_tensor.view(1, -1), received):
            total = torch.zeros(1, piece.numbers, dtype=wide, device=values.device)
            for row in coded.split(1):
                if piece.matrix:
                    one = torch.empty_like(total)
                    self._coded(piece, row).read(one)
                    total.add_(one)
                else:
                    total.add_(_as_numbers(row, values.dtype))
            values.copy_(total)
            if piece.matrix and self.rounding is not None:
                half_B = self._coded(piece, coded).scales.sum(0) / 2
                if self.kept is None:
                    self.rounding.add(piece, half_B)
                else:
                    self.rounding.add_fed_back(piece, half_B, self._half_steps.get(piece.name))
                    self._half_steps[piece.name] = half_B


_REDUCTIONS: WeakKeyDictionary[nn.Module, QuantizedReduceScatter] = WeakKeyDictionary()


def reductions(model: nn.Module) -> list[QuantizedReduceScatter]:
    """The quantized reductions of a model's gradients on this rank."""
    return [_REDUCTIONS[module] for module in model.modules() if module in _REDUCTIONS]


def error_feedback(model: nn.Module) -> ErrorFeedback:
    """The errors that this rank carries from one reduction of the model's gradients to the next."""
    return ErrorFeedback(reduction.kept for reduction in reductions(model) if reduction.kept is not None)


def _as_numbers(bytes_RB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of rows of bytes, reinterpreted as numbers."""
    return bytes_RB.clone(memory_format=torch.contiguous_format).view(dtype)


def apply_quantized(model: Decoder, layout: LayoutSpec) -> None:
    """Set the layout's quantized collectives in every group of parameters that FSDP2 gathers and reduces together."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dims = {row.name: row.dims for row in model.table}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        parts = [(parameter, names[id(parameter)], shape) for parameter, shape in grouped_parts(module)]
        trained = [
            _piece(name, shape, layout.gradient_format(dims[name]))
            for parameter, name, shape in parts
            if parameter.requires_grad
        ]
        if layout.quantized_weights in BITS and parts:
            gathered = [_piece(name, shape, layout.quantized_weights) for _, name, shape in parts]
            module.set_custom_all_gather(QuantizedAllGather(gathered))
        if layout.quantized_gradients != "none" and trained:
            kept = _kept_errors(module, trained) if layout.gradient_error_feedback else None
            _REDUCTIONS[module] = QuantizedReduceScatter(trained, kept)
            module.set_custom_reduce_scatter(_REDUCTIONS[module])


def _piece(name: str, shape: torch.Size, sent: Sent) -> SentPart:
    return SentPart(name, shape.numel(), shape[-1], matrix=len(shape) >= 2, sent=sent)


def _kept_errors(module: FSDPModule, trained: Sequence[SentPart]) -> KeptErrors | None:
    """Room for the errors of the matrices that are reduced together around a module; None without matrices."""
    parameter = grouped_parts(module)[0][0]
    assert isinstance(parameter, DTensor)
    matrices = [piece for piece in trained if piece.matrix]
    return KeptErrors(matrices, parameter.device_mesh["shard"].size()) if matrices else None
