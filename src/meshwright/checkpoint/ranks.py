"""The one place for the words that ranks exchange about a checkpoint; one process alone talks to itself."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


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


def gather_everywhere(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
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
