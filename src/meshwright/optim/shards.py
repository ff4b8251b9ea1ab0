"""Conversion between a whole tensor and a rank's shard of it.

Implemented here because torch's `full_tensor` warns that it is slow for two splits of one dim, and torch does not
implement every such split.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.comm import collectives
from meshwright.families.split import Arrangement, split_range


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
    """The global tensor: a view if it is not sharded, else gathered (collective). `part`: this rank's part of another
    tensor that is sharded like `tensor`."""
    part = local(tensor) if part is None else part
    if isinstance(tensor, DTensor):
        for axis, dim, size in reversed(list(_splits(tensor))):
            part = _gather(part, dim, size, tensor.device_mesh.get_group(axis))
    return part


def wholes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`whole` of each tensor, with one collective for all that are split over the same ranks; names are equal on all
    ranks."""
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    left = {name: list(_splits(tensor)) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    while left := {name: splits for name, splits in left.items() if splits}:
        together: dict[tuple[str, torch.dtype], list[tuple[str, int, int]]] = {}
        groups: dict[str, dist.ProcessGroup] = {}
        for name, splits in left.items():
            axis, dim, size = splits.pop()
            group = cast(DTensor, tensors[name]).device_mesh.get_group(axis)
            groups[group.group_name] = group
            together.setdefault((group.group_name, parts[name].dtype), []).append((name, dim, size))
        for (group_name, _), members in together.items():
            group = groups[group_name]
            padded = [_padded(parts[name], dim, size, group) for name, dim, size in members]
            sent = torch.cat([part.flatten() for part in padded])
            received = collectives.all_gather(sent, group).unflatten(0, (group.size(), -1))
            columns = received.split([part.numel() for part in padded], dim=1)
            for (name, dim, size), part, column in zip(members, padded, columns, strict=True):
                rows = column.reshape(group.size() * part.shape[0], *part.shape[1:])
                parts[name] = rows[:size].movedim(0, dim)
    return parts


def part_like(global_tensor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global tensor, sharded like `tensor`; a view."""
    if isinstance(tensor, DTensor):
        for axis, dim, size in _splits(tensor):
            mesh = tensor.device_mesh
            start, stop = split_range(size, mesh.size(axis), mesh.get_local_rank(axis))
            global_tensor = global_tensor.narrow(dim, min(start, size), stop - start)
    return global_tensor


def begin_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Offset of this rank's part in the global tensor."""
    begin = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        for axis, dim, size in _splits(tensor):
            start, _ = split_range(size, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis))
            begin[dim] += min(start, size)
    return tuple(begin)


def arranged(whole: torch.Tensor, arrangement: Arrangement | None) -> torch.Tensor:
    """A whole tensor in the order in which ranks store it."""
    if arrangement is None:
        return whole
    dim = arrangement.dim
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in arrangement.runs], dim)


def in_order(stored: torch.Tensor, arrangement: Arrangement | None) -> torch.Tensor:
    """The inverse of `arranged`."""
    if arrangement is None:
        return stored
    pieces = stored.split([stop - start for start, stop in arrangement.runs], arrangement.dim)
    placed = sorted(zip(arrangement.runs, pieces, strict=True), key=lambda pair: pair[0])
    return torch.cat([piece for _, piece in placed], arrangement.dim)


def _splits(tensor: DTensor) -> Iterator[tuple[int, int, int]]:
    """(axis of the mesh, dim, size of the dim before this split) in the order in which the tensor was split: the
    innermost axis first, because data parallelism comes last and is outermost."""
    shape, mesh = list(tensor.shape), tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[axis]
        if placement.is_replicate() or placement.is_partial():
            continue
        dim = placement.dim
        yield axis, dim, shape[dim]
        start, stop = split_range(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        shape[dim] = stop - start


def _gather(part: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks of a group, of total length `size`; shorter last ones are padded for the gather."""
    return collectives.all_gather(_padded(part, dim, size, group), group)[:size].movedim(0, dim)


def _padded(part: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A part padded along the first dim to the length of the longest in the group."""
    longest = -(-size // group.size())
    padded = part.new_zeros(longest, *(n for index, n in enumerate(part.shape) if index != dim))
    padded[: part.shape[dim]] = part.movedim(dim, 0)
    return padded
