"""DCP's `.metadata`, a pickle, read without executing code."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright.checkpoint.manifest import CheckpointError
from meshwright.spec.files import regular
from meshwright.torch_internals import StoredPlace

METADATA = ".metadata"


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, with a safe reader of `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of all tensors; raises `CheckpointError` if it is anything else."""
        path = Path(self.path) / METADATA
        try:
            metadata = _SafeUnpickler(io.BytesIO(regular(path).read_bytes())).load()
            _check(metadata)
        except OSError:
            raise
        except Exception as error:  # a pickle can be malformed in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(f"{path}: not readable as checkpoint metadata ({reason})") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _check(metadata: Any) -> None:
    """Raise `ValueError` if unpickled metadata does not have DCP's structure, in any part that DCP reads."""

    def must(true: bool, what: str) -> None:
        if not true:
            raise ValueError(what)

    must(isinstance(metadata, Metadata), f"it holds a {type(metadata).__name__}")
    must(isinstance(metadata.state_dict_metadata, dict), "it lists no tensors")
    must(isinstance(metadata.storage_data or {}, dict), "it lists no storage locations")
    for name, entry in metadata.state_dict_metadata.items():
        must(isinstance(name, str), "a tensor has no name")
        if isinstance(entry, BytesStorageMetadata):
            continue
        must(isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor")
        must(isinstance(entry.size, torch.Size), f"{name} has no shape")
        must(isinstance(entry.properties, TensorProperties), f"{name} has no properties")
        must(isinstance(entry.properties.dtype, torch.dtype), f"{name} has no dtype")
        must(isinstance(entry.chunks, list), f"{name} has no chunks")
        for chunk in entry.chunks:
            must(isinstance(chunk, ChunkStorageMetadata), f"{name} has a malformed chunk")
            shape = (chunk.offsets, chunk.sizes)
            must(all(isinstance(part, torch.Size) and len(part) == len(entry.size) for part in shape), f"{name}: chunk")
            inside = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            must(all(start >= 0 and size >= 0 and start + size <= end for start, size, end in inside), f"{name}: chunk")
    for index, entry in (metadata.storage_data or {}).items():
        must(isinstance(index, MetadataIndex) and isinstance(entry, StoredPlace), "a storage index is malformed")
        name, numbers = entry.relative_path, (entry.offset, entry.length)
        must(isinstance(name, str), "a storage location has no file")
        must(Path(name).name == name, f"it points outside the checkpoint, to {name!r}")
        must(all(isinstance(number, int) for number in numbers), "a storage location has no offset or length")
        must(min(numbers) >= 0, "a storage location has a negative offset or length")


class _SafeUnpickler(pickle.Unpickler):
    """Builds only the plain data classes of checkpoint metadata."""

    ALLOWED: ClassVar[Mapping[str, str]] = {
        "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        # In Megatron-core's metadata; nothing reads them.
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        "torch": "Size",
        "torch.serialization": "_get_layout",
        "collections": "OrderedDict",
        "pathlib": "Path PosixPath",
    }
    """Module -> its allowed names."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in self.ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which checkpoint metadata never needs")
