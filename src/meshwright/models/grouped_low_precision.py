"""Experts' grouped products in low precision: each expert's rows and matrix are quantized separately.

An expert is a linear layer with the products of `models/low_precision.py`. An expert's rows of one microbatch share
their scales, as on one process, wherever the rows come from: a rank that computes for several data-parallel ranks keeps
their rows separate. An expert without rows computes nothing.

Shapes: as in `models/moe.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from meshwright.models.linear import Kept
from meshwright.models.low_precision import KERNEL_SIZES, LastEncoded, LowPrecision
from meshwright.models.moe import Rows
from meshwright.models.scaling import Encoded
from meshwright.models.slots import Weights

Counts = list[list[int]]
"""Rows of every expert from every microbatch."""


class GroupedLowPrecision:
    """The product of every expert's rows with its matrix, in low precision."""

    def __init__(self, products: Sequence[LowPrecision]) -> None:
        """`products`: of each expert on this rank."""
        self.products = tuple(products)
        self.last: LastEncoded[list[Encoded]] | None = None
        """A slot: the codes shared by matrices that read the same rows."""

    def __call__(
        self, x_MI: torch.Tensor, weight_EOI: torch.Tensor, rows: Rows, read: Callable[..., list[list[int]]]
    ) -> torch.Tensor:
        """See `GroupedProduct`."""
        (flat,) = read(rows.counts.flatten())
        microbatches = rows.counts.shape[1]
        counts = [flat[start : start + microbatches] for start in range(0, len(flat), microbatches)]
        return _Apart.apply(x_MI, weight_EOI, rows.numbers, self, counts)

    def groups(self, counts: Counts) -> Iterator["_Group"]:
        """The rows that are scaled together, one after another. A group without rows is computed only if other ranks
        have rows of the same microbatch and expert, because then scales are reduced for all groups."""
        start, computes_all = 0, self.products[0].spreads
        for expert, of_microbatches in enumerate(counts):
            for count in of_microbatches:
                if count or computes_all:
                    yield _Group(expert, slice(start, start + count))
                start += count

    def encoded(self, x_MI: torch.Tensor, counts: Counts) -> list[Encoded]:
        """The rows of every group in codes."""

        def encode(x_MI: torch.Tensor) -> list[Encoded]:
            groups = ((group, self.products[group.expert]) for group in self.groups(counts))
            return [product.encoded(_rows(x_MI, group, product)) for group, product in groups]

        return encode(x_MI) if self.last is None else self.last.of(x_MI, encode)

    @property
    def keeps_codes(self) -> bool:
        """`LowPrecision.keeps_codes` of all experts."""
        return self.products[0].keeps_codes

    def __repr__(self) -> str:
        return f"{self.products[0]}, of each expert"


class _Group(NamedTuple):
    """An expert's rows of one microbatch."""

    expert: int
    rows: slice

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start


class _Apart(torch.autograd.Function):
    """A grouped product as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MI: torch.Tensor,
        weight_EOI: torch.Tensor,
        numbers_M: torch.Tensor | None,
        grouped: GroupedLowPrecision,
        counts: Counts,
    ):
        encoded = grouped.encoded(x_MI, counts)
        kept: Kept = ()
        if ctx.needs_input_grad[1]:
            kept = tuple(part for one in encoded for part in one[:2]) if grouped.keeps_codes else (x_MI,)
        ctx.save_for_backward(weight_EOI, numbers_M, *kept)
        ctx.grouped, ctx.numbers_of_rows = grouped, counts
        y_MO = x_MI.new_empty(len(x_MI), weight_EOI.shape[1])
        for group, left in zip(grouped.groups(counts), encoded, strict=True):
            weights: Weights = {"weight": weight_EOI[group.expert]}
            y = grouped.products[group.expert].product_of(left, weights, x_MI.dtype)
            y_MO[group.rows] = y[: group.size]
        return y_MO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_MO,), (weight_EOI, numbers_M, *kept) = grad_outputs, ctx.saved_tensors
        grouped: GroupedLowPrecision = ctx.grouped
        need_x, need_weight, *_ = ctx.needs_input_grad
        grad_MI = grad_MO.new_empty(len(grad_MO), weight_EOI.shape[2]) if need_x else None
        grad_EOI = torch.zeros_like(weight_EOI) if need_weight else None
        for index, group in enumerate(grouped.groups(ctx.numbers_of_rows)):
            product = grouped.products[group.expert]
            grad = _rows(grad_MO, group, product)
            weights: Weights = {"weight": weight_EOI[group.expert]}
            if numbers_M is not None:
                weights["numbers"] = _rows(numbers_M[:, None], group, product).flatten()
            if grad_MI is not None:
                grad_MI[group.rows] = product.input_gradient(grad, weights)[: group.size]
            if grad_EOI is not None:
                codes = kept[2 * index : 2 * index + 2]
                of_group = tuple(codes) if grouped.keeps_codes else (_rows(kept[0], group, product),)
                grad_EOI[group.expert] += product.weight_gradient_of(of_group, grad, weights)
        return grad_MI, grad_EOI, None, None, None


def _rows(x_MI: torch.Tensor, group: _Group, product: LowPrecision) -> torch.Tensor:
    """A group's rows, padded with rows of zeros, which change no scale and add nothing: one for an empty group, and as
    many as a kernel needs."""
    unit = KERNEL_SIZES if product.has_kernel(x_MI.device, x_MI.dtype) else 1
    more = unit if not group.size else -group.size % unit
    return F.pad(x_MI[group.rows], (0, 0, 0, more)) if more else x_MI[group.rows]
