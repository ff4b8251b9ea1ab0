"""Checksums of token files, block by block, compared when a block is first read.

`x.bin.crc` next to `x.bin` contains the CRC-32 of every BLOCK bytes, u32 little-endian. A rank compares only the blocks
that it reads, each once. A run on a corpus of any size therefore starts at once, and damaged data is reported before
training on it.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.sync import sync_file

BLOCK = 1 << 16
"""Bytes of a block: small enough for random reads of samples; its checksum takes some 30 microseconds."""
ENDING = ".crc"
"""Suffix of the checksum file, after the file's own."""


def sums_path(path: Path) -> Path:
    """The path of a file's checksums."""
    return path.with_name(path.name + ENDING)


def sums_of(path: Path) -> np.ndarray:
    """The checksums of a file: uint32, one for every block."""
    with path.open("rb") as file:
        return np.array([zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")], "<u4")


def write_sums(path: Path) -> None:
    """Write a file's checksums next to it, with fsync."""
    with sums_path(path).open("wb") as file:
        file.write(sums_of(path).tobytes())
        sync_file(file)


class Checked(np.ndarray):
    """Numbers of a memory-mapped file. Slices are compared with the checksums and returned as ordinary arrays.

    Operations on the whole array (`sum`, `==`) are not checked; call `BlockChecksums.compare_all` before them.
    """

    _sums: "BlockChecksums | None" = None

    def __array_finalize__(self, obj: Any) -> None:
        """numpy's hook: a part is compared with the same checksums."""
        self._sums = getattr(obj, "_sums", None)

    def __getitem__(self, index: Any) -> Any:
        """Compare the blocks of an integer or a slice before reading it; for any other index, all blocks."""
        if self._sums is not None:
            if isinstance(index, int | np.integer) and -len(self) <= index < len(self):
                index = int(index) % len(self)
                read = self.span(index, index + 1)
            else:
                read = super().__getitem__(index) if isinstance(index, slice) else self
            self._sums.compare(read)
        values = super().__getitem__(index)
        return values.view(np.ndarray) if isinstance(values, np.ndarray) else values

    def span(self, start: int, stop: int) -> "Checked":
        """A part that is compared when it is read."""
        return super().__getitem__(slice(start, stop))  # type: ignore[return-value]


class BlockChecksums:
    """The checksums of one memory-mapped file, and which of its blocks have been compared."""

    def __init__(self, path: Path, sums: np.ndarray, remedy: str):
        """`remedy` ends the messages about damage. Raises UserError if the number of checksums does not match the
        blocks."""
        self._path, self._sums, self._remedy = path, sums, remedy
        self._bytes: np.ndarray = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        if len(sums) != -(-len(self._bytes) // BLOCK):
            raise UserError(f"{path} is damaged: its length does not match its checksums{remedy}")
        self._known = np.zeros(len(sums), bool)
        self._begin = _address(self._bytes)

    @classmethod
    def beside(cls, path: Path, remedy: str) -> "BlockChecksums":
        """The checksums next to a file. Raises UserError if there are none."""
        try:
            return cls(path, np.fromfile(regular(sums_path(path)), "<u4"), remedy)
        except OSError as error:
            raise UserError(f"{path} has no checksums ({error.strerror}){remedy}") from error

    def numbers(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """`count` numbers starting at byte `offset`, compared when they are read."""
        numbers = self._bytes[offset : offset + count * dtype.itemsize].view(dtype).view(Checked)
        numbers._sums = self  # pyright: ignore
        return numbers

    def compare(self, part: np.ndarray) -> None:
        """Raise UserError if a block that overlaps `part`, one piece of the file, is damaged."""
        if len(part):
            start = _address(part) - self._begin
            self._compare(start // BLOCK, (start + part.nbytes - 1) // BLOCK + 1)

    def compare_all(self) -> None:
        """Raise UserError if any block is damaged."""
        self._compare(0, len(self._sums))

    def _compare(self, first: int, last: int) -> None:
        if self._known[first:last].all():
            return
        for block in (np.flatnonzero(~self._known[first:last]) + first).tolist():
            start, stop = block * BLOCK, min((block + 1) * BLOCK, len(self._bytes))
            if zlib.crc32(self._bytes[start:stop].data) != self._sums[block]:
                where = f"bytes {start} to {stop - 1}"
                raise UserError(f"{self._path} is damaged: {where} have changed since preparation{self._remedy}")
            self._known[block] = True


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
