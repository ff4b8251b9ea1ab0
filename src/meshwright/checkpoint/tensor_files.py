"""safetensors files: opened, and written as a stream; `families/tensor_headers.py` reads their headers."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.spec.errors import UserError
from meshwright.storage.sync import sync

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, as safetensors names them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def open_tensors(file: Path) -> Any:
    """A file, whose header has been checked, opened by safetensors. Raises `UserError` if safetensors refuses it."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not a safetensors file: {error}") from error


class TensorFileWriter:
    """Writes one safetensors file whose tensors are known by name, shape and dtype beforehand and come in any
    order."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        # By falling element size, as safetensors orders them, so that every tensor is aligned.
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        self._dtypes = {name: dtype for name, (_, dtype) in tensors.items()}
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._data = self._stream.tell()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Store one tensor, rounded to its dtype."""
        self._stream.seek(self._data + self._offsets.pop(name))
        stored = tensor.detach().to("cpu", self._dtypes[name]).contiguous()
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
                sync(self._stream.fileno())
