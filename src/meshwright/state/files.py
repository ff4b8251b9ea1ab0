"""State in a file: read and written whole, bypassing the page cache if the file system allows it."""

import contextlib
import errno
import mmap
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.devices import CPU, host_bytes, on_cpu
from meshwright.spec.errors import UserError

BLOCK = 4096
"""Alignment of sizes and memory addresses, as direct I/O requires."""
PIECE = 2**20
"""Bytes that are read ahead at once."""
IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs"))
"""File systems that keep files in memory."""
GB = 1e9


class OffloadError(UserError):
    """The folder or a file for state on disk is unusable."""


class Home:
    """The home of one bucket's bytes. The methods that do nothing here concern copies of it, such as cached pages."""

    moved: int = 0
    """Bytes read and written so far."""
    seconds: float = 0.0
    """The time that this took."""

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor at `offset`, of the shape and dtype of `like`."""
        raise NotImplementedError

    def read(self, buffer: torch.Tensor) -> None:
        """Fill a buffer with the beginning."""
        raise NotImplementedError

    def write(self, buffer: torch.Tensor) -> None:
        """Replace the beginning with a buffer."""
        raise NotImplementedError

    def fill(self, offset: int, tensor: torch.Tensor) -> None:
        """Replace the bytes at `offset` with a tensor's."""
        raise NotImplementedError

    def changed(self) -> None:
        """Report that a tensor in this home was filled."""

    def forget(self, size: int | None = None) -> None:
        """Drop any copy in the device's or host's memory: of all bytes, or of the first `size`."""

    def expect(self, offset: int, size: int) -> None:
        """Prepare a part for its tensors to be read."""

    def drop(self, offset: int, size: int) -> None:
        """Drop any copy of a part whose tensors were only read."""


class StateFile(Home):
    """Bytes in an unlinked file: the system frees it with the process, even after a crash.

    It is read and written whole, from buffers whose address and size are multiples of `BLOCK`. Code that needs single
    tensors (a checkpoint) maps them. Both ways see the same bytes.
    """

    def __init__(self, directory: Path, name: str, size: int, *, checksums: bool = False) -> None:
        """Reserves `size` bytes, zeros, in a new file in `directory`.

        Raises `OffloadError` if this fails: the disk is full, or the folder cannot be written.
        """
        self.path, self.size, self.checksums = directory / f"{name}-{secrets.token_hex(4)}", rounded(size), checksums
        self._checksum: tuple[int, int] | None = None  # a number of bytes, and their checksum
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _unusable(self.path, self.size, error) from error
        weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, self.size)
            self._direct = _open_directly(self._fd)
        except OSError as error:
            raise _unusable(self.path, self.size, error) from error
        finally:
            self.path.unlink()
        if self._direct is not None:
            weakref.finalize(self, os.close, self._direct)
        self._map = mmap.mmap(self._fd, self.size)

    def expect(self, offset: int, size: int) -> None:
        """Read a part into the page cache, for mapped tensors."""
        began, piece = time.perf_counter(), bytearray(min(size, PIECE))
        for place in range(offset, offset + size, PIECE):
            try:
                os.preadv(self._fd, [memoryview(piece)[: offset + size - place]], place)
            except OSError as error:
                raise self._broken("read", error) from error
        self._count(size, began)

    def drop(self, offset: int, size: int) -> None:
        """Drop a part, unchanged since it was written, from the page cache."""
        start = offset // BLOCK * BLOCK
        self._map.madvise(mmap.MADV_DONTNEED, start, min(self.size, rounded(offset + size)) - start)
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The mapped tensor at `offset`, of the shape and dtype of `like`; it keeps the file alive."""
        return torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)

    def read(self, buffer: torch.Tensor) -> None:
        """Fill a buffer of `BLOCK`s with the beginning of the file."""
        began = time.perf_counter()
        self._move(os.preadv, buffer, "read")
        if self._checksum is not None and _checksum(buffer[: self._checksum[0]]) != self._checksum:
            raise OffloadError(
                f"{self.path.parent}: {self.path.name} fails its checksum, so the disk or its controller is "
                "damaged; continue from the last checkpoint with --resume, on another disk"
            )
        self._count(len(buffer), began)

    def write(self, buffer: torch.Tensor) -> None:
        """Replace the beginning of the file with a buffer of `BLOCK`s."""
        began = time.perf_counter()
        self._checksum = _checksum(buffer) if self.checksums else None
        self._move(os.pwritev, buffer, "written")
        if self._direct is None:
            self.forget(len(buffer))
        self._count(len(buffer), began)

    def changed(self) -> None:
        """Report that a mapped tensor was filled, so the checksum is outdated."""
        self._checksum = None

    def fill(self, offset: int, tensor: torch.Tensor) -> None:
        """Replace the bytes at `offset` with a tensor's, in the page cache: writing to a mapped tensor would first read
        it."""
        view = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        while view:
            try:
                count = os.pwrite(self._fd, view, offset)
            except OSError as error:
                raise self._broken("written", error) from error
            view, offset = view[count:], offset + count

    def forget(self, size: int | None = None) -> None:
        """Flush mapped tensors to disk and drop them from the page cache: all, or the first `size` bytes."""
        size = self.size if size is None else size
        try:
            self._map.flush(0, size)
        except OSError as error:
            raise self._broken("written", error) from error
        self.drop(0, size)

    def _move(self, move: Callable[[int, list[memoryview], int], int], buffer: torch.Tensor, done: str) -> None:
        """Read or write a whole buffer; with buffered I/O if the file system accepts O_DIRECT but does not honour
        it."""
        view, place = buffer.numpy().data, 0
        while place < len(view):
            try:
                count = move(self._fd if self._direct is None else self._direct, [view[place:]], place)
            except OSError as error:
                if error.errno != errno.EINVAL or self._direct is None:
                    raise self._broken(done, error) from error
                self._direct = None
                continue
            if count <= 0:
                raise self._broken(done, OSError(errno.EIO, os.strerror(errno.EIO)))
            place += count

    def _count(self, size: int, began: float) -> None:
        self.moved += size
        self.seconds += time.perf_counter() - began

    def _broken(self, done: str, error: OSError) -> OffloadError:
        return OffloadError(
            f"{self.path}: the state on disk could not be {done} ({(error.strerror or 'error').lower()}); the last "
            "checkpoint is intact: continue from it with --resume and another layout.offload.directory"
        )


def _checksum(buffer: torch.Tensor) -> tuple[int, int]:
    return len(buffer), zlib.crc32(buffer.numpy().data)


def rounded(size: int, block: int = BLOCK) -> int:
    """`size` rounded up to a positive multiple of `block`."""
    return max(1, -(-size // block)) * block


def aligned_buffer(size: int, device: torch.device = CPU) -> torch.Tensor:
    """A byte buffer that begins at a multiple of `BLOCK`, for state that a step on `device` needs."""
    if not on_cpu(device):
        return host_bytes(size, device)
    whole = torch.empty(size + BLOCK, dtype=torch.uint8)
    start = -whole.data_ptr() % BLOCK
    return whole[start : start + size]


def check_directory(directory: Path) -> None:
    """Make the folder. Raises `OffloadError` if that fails, or if its files would be in memory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(f"layout.offload.directory: {error.filename}: {(error.strerror or '').lower()}") from error
    kind = file_system(directory)
    if kind in IN_MEMORY:
        raise OffloadError(
            f"layout.offload.directory: {directory} is on {kind}, whose files are in memory; use a folder on a disk"
        )


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of `path`'s file system; empty if the system does not report it."""
    longest, path = (0, ""), path.resolve()
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, point, kind, *_ = line.split()
            place = Path(point.replace("\\040", " "))
            if path.is_relative_to(place):
                longest = max(longest, (len(place.parts), kind), key=lambda entry: entry[0])
    return longest[1]


def _open_directly(file: int) -> int | None:
    """A second descriptor of an open file, that bypasses the page cache; None if the file system does not support it.

    Opened by its descriptor: in a folder that others may write, its name may be another file by now.
    """
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):
        return None


def _unusable(path: Path, size: int, error: OSError) -> OffloadError:
    """The error for a file that could not be created."""
    free = ""
    with contextlib.suppress(OSError):
        stat = os.statvfs(path.parent)
        free = f", {stat.f_bavail * stat.f_frsize / GB:.3g} GB are free"
    return OffloadError(
        f"{path}: {(error.strerror or 'cannot be made').lower()}: state on disk needs {size / GB:.3g} GB in this "
        f"file{free}; free space, or use another layout.offload.directory"
    )
