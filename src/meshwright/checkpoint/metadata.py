"""The one place that reads DCP's `.metadata`, a pickle, without letting it run code."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from meshwright.checkpoint.manifest import CheckpointError

METADATA = ".metadata"


class SafeReader(dcp.FileSystemReader):
    """DCP's reader of files, but for `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of all tensors; raises `CheckpointError` where it is anything else."""
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
