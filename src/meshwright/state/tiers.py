"""Homes of state buckets between steps, in host memory or in files, and their movement during computation."""

import contextlib
import ctypes
import math
import resource
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.devices import after
from meshwright.spec.offload import PAGE_CACHE_SHARE, OffloadSpec
from meshwright.state.files import Home, StateFile, aligned_buffer, check_directory, rounded

SLOW = 200e6
"""A disk with fewer bytes a second is reported as slow."""


M_MMAP_THRESHOLD, LARGE = -3, 2**16
"""A constant of <malloc.h>, and the size in bytes of a large block."""


class HostMemory(Home):
    """A bucket's home in host memory, pinned for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = aligned_buffer(rounded(size), device)
        self._bytes.zero_()

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        return self._bytes[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def read(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self._bytes[: len(buffer)])

    def write(self, buffer: torch.Tensor) -> None:
        self._bytes[: len(buffer)].copy_(buffer)

    def fill(self, offset: int, tensor: torch.Tensor) -> None:
        self.tensor(offset, tensor).copy_(tensor)


@dataclass(frozen=True)
class Tier:
    """A place for state, as set by a run's `layout.offload`."""

    offload: OffloadSpec
    directory: Path
    """Folder for the files of `optimizer: disk`."""
    device: torch.device
    """The device of the optimizer's step."""
    rank: int = 0
    free: int = 0
    """Bytes of host memory that are free for this rank's files."""

    @property
    def cache_room(self) -> int:
        """Bytes of gradients on disk that may stay in the page cache; the others are flushed and dropped."""
        return int(self.free * PAGE_CACHE_SHARE) if self.offload.optimizer == "disk" else 0

    def prepare(self) -> None:
        """Raise `OffloadError` if the folder is unusable."""
        if self.offload.optimizer == "disk":
            check_directory(self.directory)
            give_back_what_is_freed()
            allow_many_files()

    def home(self, name: str, size: int) -> Home:
        """A new home of this many bytes, zeros."""
        if self.offload.optimizer == "disk":
            return StateFile(self.directory, f"rank{self.rank}-{name}", size, checksums=self.offload.checksums)
        return HostMemory(size, self.device)

    def buffer(self, size: int) -> torch.Tensor:
        """A buffer for reading and writing a home."""
        return aligned_buffer(size, self.device)


def give_back_what_is_freed() -> None:
    """Make the C library return large freed blocks to the system, if it supports that.

    By default glibc keeps them in a heap in which aligned blocks cannot be reused without gaps: moving the state of 42
    M parameters out of memory left 160 MB allocated.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def allow_many_files() -> None:
    """Raise this process's limit of open files to the system's maximum: a bucket has up to three."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Mover:
    """Reads the next home and writes the previous one, each in a thread, while the current one is stepped."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._reader, self._writer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"meshwright-{verb}") for verb in ("fetch", "put")
        )
        self._ahead: dict[int, tuple[torch.Tensor, Future[None]]] = {}
        self._written: dict[int, Future[None]] = {}
        self._forgetting: list[Future[None]] = []
        self._free: list[torch.Tensor] = []
        """Buffers that were written, for the next reads of a step."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers being read, and those for the next reads."""
        return [*(buffer for buffer, _ in self._ahead.values()), *self._free]

    def read_ahead(self, key: int, home: Home, size: int) -> None:
        """Begin to read a home's first `size` bytes, after any pending write to it."""
        if key not in self._ahead:
            buffer, before = self._buffer(size), self._written.pop(key, None)
            part = buffer[:size]  # in this thread: a rehearsal's tensors must not be cut in another

            def read() -> None:
                if before is not None:
                    before.result()
                home.read(part)

            self._ahead[key] = buffer, self._reader.submit(read)

    def _buffer(self, size: int) -> torch.Tensor:
        """A written buffer, reused, if it is large enough, else a new one."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= size:
                return buffer
        return self.tier.buffer(size)

    def read(self, key: int, home: Home, size: int) -> torch.Tensor:
        """A buffer that begins with a home's contents; waits for the read."""
        self.read_ahead(key, home, size)
        buffer, done = self._ahead.pop(key)
        done.result()
        return buffer

    def write(self, key: int, home: Home, buffer: torch.Tensor, size: int) -> None:
        """Begin to write the first `size` bytes of a buffer, which then belongs to the thread; first waits for the
        previous write. The thread waits for copies from the device to the buffer."""
        part, filled = buffer[:size], after(self.tier.device)

        def write() -> None:
            filled()
            home.write(part)
            self._free.append(buffer)

        while self._written:
            self._written.pop(next(iter(self._written))).result()
        self._written[key] = self._writer.submit(write)

    def forget(self, home: Home) -> None:
        """Make a home drop its copy in memory, asynchronously."""
        self._forgetting.append(self._writer.submit(home.forget))

    def settle(self) -> None:
        """Wait until all state is at home. Raises the threads' errors."""
        self._ahead.clear()
        while self._written:
            self._written.pop(next(iter(self._written))).result()
        self._free.clear()
        while self._forgetting:
            self._forgetting.pop().result()


def cut_evenly(sizes: list[int], most: int) -> list[int]:
    """How many of the sizes, in order, go into each bucket of at most `most`; a larger one gets its own bucket."""
    counts, filled = [], math.inf
    for size in sizes:
        if filled + size > most:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


def complaint(homes: list[Home]) -> str | None:
    """A warning if files are read and written slowly."""
    moved, seconds = (sum(getattr(home, field) for home in homes) for field in ("moved", "seconds"))
    if seconds < 1 or moved / seconds >= SLOW:
        return None
    return (
        f"layout.offload: the disk reads and writes {moved / seconds / 1e6:.0f} MB/s, so the optimizer waits for "
        "it; use a folder on a faster disk (layout.offload.directory)"
    )
