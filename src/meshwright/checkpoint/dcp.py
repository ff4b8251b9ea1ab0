"""The one place that writes and reads the sharded state of a run, through torch.distributed.checkpoint (DCP).

A checkpoint is one flat folder: DCP's shards and `.metadata`, `trainer.json` with everything that is not a tensor, and
the manifest. Tensors are named `model.NAME` and `optimizer.NAME.KEY`, so any layout can read what any other wrote.
"""

import contextlib
import io
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from meshwright.checkpoint.manifest import (
    CheckpointError,
    checkpoint_name,
    describe_file,
    publish,
    read_manifest,
    verify_files,
    verify_no_foreign_files,
)

METADATA = ".metadata"
TRAINER = "trainer.json"


def save_checkpoint(
    root: Path, step: int, tensors: dict[str, torch.Tensor], trainer: dict[str, Any], *, keep_last: int
) -> Path:
    """Save `tensors` (plain or DTensor) and the JSON value `trainer` as the checkpoint of `step`; collective.

    Returns the published folder. Every rank hashes what it wrote; rank 0 publishes.
    """
    staging = root / f".writing-{checkpoint_name(step)}"
    if _rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _barrier()
    with _plain_errors(f"{staging}: cannot be written"):
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(staging), no_dist=not dist.is_initialized())
    mine = sorted(staging.glob(f"__{_rank()}_*.distcp"))
    if _rank() == 0:
        (staging / TRAINER).write_text(json.dumps(trainer, indent=1))
        mine += [staging / METADATA, staging / TRAINER]
    described = _gather({path.name: describe_file(path) for path in mine})
    if _rank() == 0:
        files = {name: entry for part in described for name, entry in part.items()}
        publish(staging, root, step, dict(sorted(files.items())), keep_last=keep_last)
    _barrier()
    return root / checkpoint_name(step)


def verify_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Check every file against the manifest, the work divided over ranks; returns the saved `trainer` value.

    Raises the same `CheckpointError` on every rank.
    """
    problem = None
    try:
        manifest = read_manifest(checkpoint)
        verify_no_foreign_files(checkpoint, manifest)
        names = sorted(manifest["files"])[_rank() :: _world_size()]
        verify_files(checkpoint, {name: manifest["files"][name] for name in names})
        for needed in (METADATA, TRAINER):
            if needed not in manifest["files"]:
                raise CheckpointError(f"{checkpoint / needed}: not named by the manifest, so this is not a checkpoint")
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in _gather(problem) if text]
    if problems:
        raise CheckpointError(problems[0])
    return json.loads((checkpoint / TRAINER).read_text())


def load_tensors(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from a verified checkpoint, whatever layout wrote it; collective.

    Raises `CheckpointError` where a tensor is missing or has another shape.
    """
    reader = _SafeReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{checkpoint}: holds no {name}; it was saved by a run with another model or optimizer"
            )
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(entry.size)}, but this run's is {tuple(tensor.shape)}; "
                "continue with the model that was saved"
            )
    with _plain_errors(f"{checkpoint}: cannot be read"):
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


class _SafeReader(dcp.FileSystemReader):
    """Reads DCP's pickled `.metadata` without letting it run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            metadata = _SafeUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise CheckpointError(f"{path}: not readable as checkpoint metadata ({error})") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, not checkpoint metadata")
        for entry in (metadata.storage_data or {}).values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise CheckpointError(f"{path}: points outside its folder, to {entry.relative_path!r}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafeUnpickler(pickle.Unpickler):
    """Builds only the plain data classes of which checkpoint metadata consists."""

    ALLOWED = frozenset(
        [
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ]
        + [("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")]
        + [("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
        + [("pathlib", "Path"), ("pathlib", "PosixPath")]
    )

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which checkpoint metadata never needs")


@contextlib.contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """DCP raises what is no `Exception`, and warns whenever one process saves alone, which here is intended."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what} (rank {rank}: {type(cause).__name__}: {cause})") from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
