"""Materialization: fills a model on the meta device with weights; each rank fills only its shard."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import torch_internals
from meshwright.families.split import Arrangement
from meshwright.models import named_tensors
from meshwright.spec.model import Parameter

RowSource = Callable[[Parameter, int, int], torch.Tensor]
"""(parameter, start, stop) -> rows [start, stop) of dim 0 of its global value, on the CPU."""

ROWS_AT_ONCE_BYTES = 256 * 2**20


@torch.no_grad()
def materialize(model: nn.Module, table: Iterable[Parameter], source: RowSource, device: torch.device) -> None:
    """Allocate `model` on `device` and fill it."""
    model.to_empty(device=device)
    fill(model, table, source)


@torch.no_grad()
def fill(
    model: nn.Module,
    table: Iterable[Parameter],
    source: RowSource,
    arrangements: Mapping[str, Arrangement] = MappingProxyType({}),
) -> None:
    """Fill every tensor of `table` in an allocated `model` from `source`, a slice at a time.

    `arrangements`: of parameters that are stored in another order. The result does not depend on the layout, and no
    rank ever holds more than its shard and one slice.
    """
    tensors = named_tensors(model)
    for parameter in table:
        tensor = tensors[parameter.name]
        if isinstance(tensor, DTensor):
            shape, offset = torch_internals.local_part(tensor)
            local = tensor.to_local()
        else:
            shape, offset, local = tensor.shape, (0,) * tensor.dim(), tensor
        if local.numel():
            ranges = [[(begin, begin + size)] for begin, size in zip(offset, shape, strict=True)]
            if (arranged := arrangements.get(parameter.name)) is not None:
                ranges[arranged.dim] = list(arranged.within(*ranges[arranged.dim][0]))
            _fill(local, parameter, source, ranges)


def _fill(local: torch.Tensor, parameter: Parameter, source: RowSource, ranges: list[list[tuple[int, int]]]) -> None:
    """Fill `local` with the part of each dim that `ranges` describe, one after another."""
    row_bytes = 4 * parameter.numel // parameter.shape[0]
    at_once, done = max(1, ROWS_AT_ONCE_BYTES // max(1, row_bytes)), 0
    for begin, end in ranges[0]:
        for start in range(begin, end, at_once):
            values = source(parameter, start, min(start + at_once, end))
            for dim, parts in enumerate(ranges[1:], 1):
                pieces = [values.narrow(dim, first, last - first) for first, last in parts]
                values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
            local[done : done + len(values)].copy_(values)
            done += len(values)
