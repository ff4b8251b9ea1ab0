"""safetensors files: opened, and written as a stream; `families/tensor_headers.py` reads their headers."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.families.tensor_headers import StoredTensor
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.sync import sync_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by safetensors' names."""

OTHERS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8} | {
    name: getattr(torch, f"int{name[1:]}") for name in ("I8", "I16", "I32", "I64")
}
"""Dtypes of other tensors: quantized weights, and the state of parts of a model that are copied."""

NAMES = {dtype: name for name, dtype in (DTYPES | OTHERS).items()}


def named_dtype(tensor: StoredTensor) -> torch.dtype:
    """The dtype of a stored tensor. Raises `UserError` if torch has none or no supported program writes it."""
    try:
        return (DTYPES | OTHERS)[tensor.dtype]
    except KeyError:
        raise UserError(f"{tensor.file}: contains a tensor in {tensor.dtype}, which is not supported") from None


def open_tensors(file: Path) -> Any:
    """Open a file with safetensors, after its header has been checked. Raises `UserError` if safetensors refuses it."""
    try:
        return safe_open(regular(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not a safetensors file: {error}") from error


class UnmappedTensor:
    """One tensor of a file with a checked header, read piece by piece with ordinary reads.

    safetensors maps the whole file as private writable memory, which counts against a process's memory limit
    (RLIMIT_DATA, RLIMIT_AS) although it occupies none.
    """

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        """Rows, or rows and columns, as with safetensors' slices."""
        if isinstance(places, tuple):
            return self[places[0]][:, places[1]]
        count, *rest = self._tensor.shape or (1,)
        start, stop, _ = places.indices(count)
        rows = torch.empty(max(0, stop - start), *rest, dtype=named_dtype(self._tensor))
        content = rows.view(-1).view(torch.uint8).numpy().data if rows.numel() else memoryview(b"")
        with self._tensor.file.open("rb", buffering=0) as stream:
            stream.seek(self._tensor.begin + start * prod(rest) * rows.itemsize)
            while content:
                size = stream.readinto(content)
                if not size:
                    raise UserError(
                        f"{self._tensor.file} has become shorter since it was opened; another process may be "
                        "replacing it"
                    )
                content = content[size:]
        return rows


class TensorFileWriter:
    """Writes one safetensors file. The tensors' names, shapes and dtypes are known beforehand; the tensors arrive in
    any order."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        # By decreasing element size, as safetensors orders them, so that every tensor is aligned.
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
                sync_file(self._stream)
