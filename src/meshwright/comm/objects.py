"""Exchange of Python objects between ranks; one process alone exchanges them with itself."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any] | None:
    """`value` of every rank, in rank order, on rank 0; None elsewhere. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values)
    return values


def gather_everywhere(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank of `group`, or of all ranks, in rank order, on every rank of it. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def scatter(values: Sequence[Any] | None) -> Any:
    """This rank's item of what rank 0 brings. Collective."""
    if not dist.is_initialized():
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(values) if values is not None else None)
    return mine[0]


def from_first(value: Any) -> Any:
    """What rank 0 brings, on every rank. Collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
