"""Materialization: fills a model on the meta device with weights; each rank fills only its shard."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import torch_internals
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
def fill(model: nn.Module, table: Iterable[Parameter], source: RowSource) -> None:
    """Fill every tensor of `table` in an allocated `model` from `source`, a slice at a time.

    The result does not depend on the layout, and no rank ever holds more than its shard and one slice.
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
            _fill(local, parameter, source, tuple(shape), tuple(offset))


def _fill(
    local: torch.Tensor, parameter: Parameter, source: RowSource, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    row_bytes = 4 * parameter.numel // parameter.shape[0]
    rows = max(1, ROWS_AT_ONCE_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        values = source(parameter, offset[0] + start, offset[0] + stop)
        for dim in range(1, len(shape)):
            values = values.narrow(dim, offset[dim], shape[dim])
        local[start:stop].copy_(values)
