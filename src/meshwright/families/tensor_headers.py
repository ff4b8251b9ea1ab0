"""Tensor names, shapes and dtypes of a Hugging Face directory, read from the files' headers alone. No torch here.

A safetensors file is a little-endian 64-bit length, that many bytes of JSON naming every tensor's dtype, shape and
place, and the tensors' bytes in C order.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

HEADER_LIMIT = 25 * 10**6
"""Largest header accepted, in bytes: the limit of the Hugging Face Hub's own parser."""

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the dtypes that weights have, by safetensors' names."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    dtype: str
    """safetensors' name, e.g. `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises:
        UserError: the file is missing, cut short, no safetensors file, or has a header beyond HEADER_LIMIT.
    """
    try:
        size = regular(file).stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise UserError(f"{file} is a Git LFS pointer, not the weights; fetch them with git lfs pull")
            if length > HEADER_LIMIT:
                raise UserError(f"{file} is not a safetensors file: its header would be {length:,} bytes long")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a safetensors file: its header is not JSON") from error
    available = size - 8 - length
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _checked(file, name, entry, 8 + length, available) for name, entry in entries.items()}
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a safetensors file: its header is malformed") from error
    _check_cover(file, {name: entry["data_offsets"] for name, entry in entries.items()}, available)
    return tensors


def _check_cover(file: Path, spans: Mapping[str, tuple[int, int]], available: int) -> None:
    """Raise `UserError` unless tensors are contiguous from the first byte to the last, as the format requires."""
    place = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: tuple(item[1])):
        if begin != place:
            unused = f"leaves {begin - place:,} bytes before it unused"
            how = "overlaps the previous tensor" if begin < place else unused
            raise UserError(f"{file} is damaged: tensor {name} {how}")
        place = end
    if place != available:
        raise UserError(f"{file} is damaged: {available - place:,} bytes follow its last tensor")


def _checked(file: Path, name: str, entry: Mapping[str, Any], data: int, available: int) -> StoredTensor:
    """`data`: the first byte after the header."""
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= begin <= end <= available:
        raise UserError(f"{file} is truncated: tensor {name} ends at byte {end:,} of {available:,}")
    size = FLOATS.get(entry["dtype"])
    if size is not None and prod(shape) * size != end - begin:
        raise UserError(f"{file}: tensor {name} of shape {list(shape)} does not fill its {end - begin:,} bytes")
    return StoredTensor(file, entry["dtype"], shape, data + begin)


def read_scalar(tensor: StoredTensor) -> float:
    """The value of a 0-dim tensor with a dtype in FLOATS."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        content = stream.read(FLOATS[tensor.dtype])
    if tensor.dtype == "BF16":  # the upper half of an F32
        return struct.unpack("<f", bytes(2) + content)[0]
    return struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[tensor.dtype], content)[0]


def stored_tensors(directory: Path) -> tuple[dict[str, StoredTensor], Path]:
    """Every tensor of the directory by its stored name, and its file."""
    index = directory / INDEX
    if index.exists():
        return _from_index(index), index
    if (directory / WEIGHTS).exists():
        return read_header(directory / WEIGHTS), directory / WEIGHTS
    if any(directory.glob("*.bin")):
        raise UserError(
            f"{directory} has only .bin weights, which can run code when loaded; convert them to {WEIGHTS} first"
        )
    raise UserError(f"{directory} has no weights: neither {WEIGHTS} nor {INDEX}")


def _from_index(index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(regular(index).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of weights: it has no valid weight_map") from error
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{index} names {file!r}, which is not a safetensors file in that directory")
        headers[file] = read_header(index.parent / file)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise UserError(f"{index} lists {name} in {file}, which does not contain it")
    return {name: headers[file][name] for name, file in weight_map.items()}
