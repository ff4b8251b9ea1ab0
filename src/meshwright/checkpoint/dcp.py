"""Checkpoint tensors in shards: their layout, writing and reading, in the format of torch.distributed.checkpoint.

A checkpoint is one flat folder: DCP's shards and `.metadata`, `trainer.json` with everything that is not a tensor, and
the manifest. Tensors are named `model.NAME` and `optimizer.NAME.KEY`, so any layout can read checkpoints of any other.
DCP plans which rank writes which part; reading and writing themselves need no communication.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from meshwright import torch_internals
from meshwright.checkpoint.manifest import CheckpointError
from meshwright.checkpoint.metadata import SafeReader
from meshwright.comm.objects import gather, rank, scatter
from meshwright.families.split import Arrangement
from meshwright.spec.files import regular


class ArrangedPart:
    """A tensor whose ranks store a dim in another order: its pieces are saved and loaded in the model's own order."""

    def __init__(self, tensor: DTensor, arrangement: Arrangement) -> None:
        self.tensor, self.dim = tensor, arrangement.dim
        shape, offset = torch_internals.local_part(tensor)
        self.shape, self.offset = shape, offset
        self.runs = tuple(arrangement.within(offset[self.dim], offset[self.dim] + shape[self.dim]))

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.size()

    def pieces(self) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int]]]:
        """The offset of each piece in the whole tensor, and its (dim, start, length) in this rank's part."""
        position = 0
        for start, stop in self.runs:
            offset = (*self.offset[: self.dim], start, *self.offset[self.dim + 1 :])
            yield offset, (self.dim, position, stop - start)
            position += stop - start

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """See DCP's `_Checkpointable`."""
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(self._sizes(length)))
            for offset, (_, _, length) in self.pieces()
            if 0 not in self.shape
        ]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """See DCP's `_Checkpointable`."""
        properties = TensorProperties.create_from_tensor(self.tensor.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def _sizes(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def in_model_order(tensors: Mapping[str, torch.Tensor], arrangements: Mapping[str, Arrangement]) -> dict[str, Any]:
    """A run's tensors for `plan_shards` and `load_tensors`, with those as `ArrangedPart` that belong to a parameter
    with an arrangement, by its name within theirs."""
    arranged: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        for parameter, arrangement in arrangements.items():
            if isinstance(tensor, DTensor) and tensor.dim() and f".{parameter}." in f".{name}.":
                arranged[name] = ArrangedPart(tensor, arrangement)
    return arranged


@dataclass(frozen=True)
class ShardPlan:
    """The assignment of tensor parts to ranks, for every save of a run."""

    names: frozenset[str]
    """All tensors of this rank in the plan."""
    mine: SavePlan
    """The parts that this rank writes; one rank writes a part that several hold."""
    index: Metadata | None
    """The index of all parts, on rank 0."""
    pieces: dict[tuple[str, tuple[int, ...]], tuple[int, int, int]]
    """(name, offset) of each piece of an `ArrangedPart` -> its (dim, start, length) in this rank's part."""
    token: str
    """Random text that nobody else knows: with it, no two processes write the same folder, and none can be guessed."""


def plan_shards(tensors: dict[str, Any]) -> ShardPlan:
    """Divide `tensors` (plain, DTensor or `ArrangedPart`; ranks may hold different ones) over the ranks that hold them;
    collective."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank() == 0)
    plans = gather(planner.create_local_plan())
    index, planned, token = None, None, secrets.token_hex(16)
    if plans is not None:
        plans, index = planner.create_global_plan(plans)
        plans = dcp.FileSystemWriter("").prepare_global_plan(plans)
        planned = [(plan, token) for plan in plans]
    mine, token = scatter(planned)
    parts = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ArrangedPart)}
    pieces = {(name, offset): place for name, part in parts.items() for offset, place in part.pieces()}
    return ShardPlan(frozenset(tensors), mine, index, pieces, token)


def local_part(tensor: torch.Tensor | ArrangedPart) -> torch.Tensor:
    """This rank's part of `tensor`."""
    tensor = (tensor.tensor if isinstance(tensor, ArrangedPart) else tensor).detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_shards(folder: Path, plan: ShardPlan, parts: dict[str, torch.Tensor]) -> list[WriteResult]:
    """Write this rank's share; `parts` are the local parts by name, on the CPU or the device. Not collective."""
    if not plan.mine.items:
        return []
    planner = _PartsPlanner(parts, plan.pieces)
    planner.finish_plan(plan.mine)
    return dcp.FileSystemWriter(folder).write_data(plan.mine, planner).wait()


def write_index(folder: Path, plan: ShardPlan, results: list[list[WriteResult]]) -> None:
    """Write `.metadata`, the index of all parts, from the results of `write_shards` on every rank."""
    assert plan.index is not None
    dcp.FileSystemWriter(folder).finish(plan.index, results)


class _PartsPlanner(DefaultSavePlanner):
    """A planner that finds parts by name: each rank has one part of a tensor, which may be saved in pieces."""

    def __init__(
        self, parts: dict[str, torch.Tensor], pieces: Mapping[tuple[str, tuple[int, ...]], tuple[int, int, int]]
    ) -> None:
        super().__init__()
        self._parts, self._pieces = parts, pieces

    def lookup_object(self, index: MetadataIndex) -> Any:
        part = self._parts[index.fqn]
        piece = self._pieces.get((index.fqn, tuple(index.offset or ())))
        return part if piece is None else part.narrow(*piece)


class _PiecesPlanner(DefaultLoadPlanner):
    """A planner that also loads into the pieces of an `ArrangedPart`."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        part = self.state_dict[index.fqn]
        if not isinstance(part, ArrangedPart):
            return super().lookup_tensor(index)
        return local_part(part).narrow(*dict(part.pieces())[tuple(index.offset or ())])


def load_tensors(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from a verified checkpoint of any layout. Each rank reads independently.

    Raises `CheckpointError` if a tensor is missing or has another shape.
    """
    reader = SafeReader(checkpoint)
    metadata = reader.read_metadata()
    _check_shapes(checkpoint, metadata, {name: tuple(tensor.size()) for name, tensor in tensors.items()})
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        regular(checkpoint / name)
    planner = _PiecesPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    planner.state_dict = dict(tensors)  # it drops what it does not know
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
