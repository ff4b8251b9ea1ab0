"""Checkpoint tensors in shards: their layout, writing and reading, in the format of torch.distributed.checkpoint.

A checkpoint is one flat folder: DCP's shards and `.metadata`, `trainer.json` with everything that is not a tensor, and
the manifest. Tensors are named `model.NAME` and `optimizer.NAME.KEY`, so any layout can read checkpoints of any other.
DCP plans which rank writes which part; reading and writing themselves need no communication.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.manifest import CheckpointError
from meshwright.checkpoint.metadata import SafeReader
from meshwright.comm.objects import gather, rank, scatter
from meshwright.spec.files import regular


@dataclass(frozen=True)
class ShardPlan:
    """The assignment of tensor parts to ranks, for every save of a run."""

    names: frozenset[str]
    """All tensors of this rank in the plan."""
    mine: SavePlan
    """The parts that this rank writes; one rank writes a part that several hold."""
    index: Metadata | None
    """The index of all parts, on rank 0."""
    token: str
    """Random text that nobody else knows: with it, no two processes write the same folder, and none can be guessed."""


def plan_shards(tensors: dict[str, torch.Tensor]) -> ShardPlan:
    """Divide `tensors` (plain or DTensor; ranks may hold different ones) over the ranks that hold them; collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=rank() == 0)
    plans = gather(planner.create_local_plan())
    index, planned, token = None, None, secrets.token_hex(16)
    if plans is not None:
        plans, index = planner.create_global_plan(plans)
        plans = dcp.FileSystemWriter("").prepare_global_plan(plans)
        planned = [(plan, token) for plan in plans]
    mine, token = scatter(planned)
    return ShardPlan(frozenset(tensors), mine, index, token)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_shards(folder: Path, plan: ShardPlan, parts: dict[str, torch.Tensor]) -> list[WriteResult]:
    """Write this rank's share; `parts` are the local parts by name, on the CPU or the device. Not collective."""
    if not plan.mine.items:
        return []
    planner = _PartsPlanner(parts)
    planner.finish_plan(plan.mine)
    return dcp.FileSystemWriter(folder).write_data(plan.mine, planner).wait()


def write_index(folder: Path, plan: ShardPlan, results: list[list[WriteResult]]) -> None:
    """Write `.metadata`, the index of all parts, from the results of `write_shards` on every rank."""
    assert plan.index is not None
    dcp.FileSystemWriter(folder).finish(plan.index, results)


class _PartsPlanner(DefaultSavePlanner):
    """A planner that finds parts by name only: each rank has one part of a tensor."""

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._parts[index.fqn]


def load_tensors(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from a verified checkpoint of any layout. Each rank reads independently.

    Raises `CheckpointError` if a tensor is missing or has another shape.
    """
    reader = SafeReader(checkpoint)
    metadata = reader.read_metadata()
    _check_shapes(checkpoint, metadata, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        regular(checkpoint / name)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=rank() == 0)
    try:
        plan = planner.finish_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
    except Exception as error:  # a shard that does not match its index
        raise CheckpointError(f"{checkpoint}: cannot be read ({type(error).__name__}: {error})") from error


def check_shapes(checkpoint: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointError` if `load_tensors` would: if a tensor is missing or has another shape."""
    _check_shapes(checkpoint, SafeReader(checkpoint).read_metadata(), shapes)


def _check_shapes(checkpoint: Path, metadata: Metadata, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{checkpoint}: has no {name}; it belongs to a run with another model or optimizer")
        if tuple(entry.size) != shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(entry.size)}, but this run's has {shape}; continue with the "
                "saved model"
            )


def held_tensors(checkpoint: Path) -> set[str]:
    """Names of all tensors that a verified checkpoint holds."""
    return set(SafeReader(checkpoint).read_metadata().state_dict_metadata)
