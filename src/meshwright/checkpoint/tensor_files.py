"""The one place that reads and writes safetensors files: headers checked before anything is believed, data
streamed.

A file is a little-endian 64-bit length, that many bytes of JSON naming every tensor's dtype, shape and place,
and the tensors' bytes in C order.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

HEADER_LIMIT = 25 * 10**6
"""Largest header accepted, in bytes: the limit of the Hugging Face Hub's own parser."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, as safetensors names them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    dtype: str
    """As safetensors names it, e.g. `BF16`."""
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ValueError: the file is missing, cut short, no safetensors file, or has a header beyond HEADER_LIMIT.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with git lfs pull")
            if length > HEADER_LIMIT:
                raise ValueError(f"{file} is no safetensors file: its header would be {length:,} bytes long")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no safetensors file: its header is not JSON") from error
    try:
        return {
            name: _checked(file, name, entry, size - 8 - length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no safetensors file: its header is malformed") from error


def _checked(file: Path, name: str, entry: Mapping[str, Any], available: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= begin <= end <= available:
        raise ValueError(f"{file} is cut short: tensor {name} ends at byte {end:,} of {available:,}")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{file}: tensor {name} of shape {list(shape)} does not fill its {end - begin:,} bytes")
    return StoredTensor(file, entry["dtype"], shape)


class TensorFileWriter:
    """Writes one safetensors file whose tensors are known by name and shape beforehand and come in any
    order."""

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        self._dtype = dtype
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._data = self._stream.tell()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Store one tensor, rounded to the file's dtype."""
        self._stream.seek(self._data + self._offsets.pop(name))
        stored = tensor.detach().to("cpu", self._dtype).contiguous()
        self._stream.write(stored.view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if error is None:
                assert not self._offsets, f"never written: {', '.join(self._offsets)}"
                self._stream.flush()
                os.fsync(self._stream.fileno())
