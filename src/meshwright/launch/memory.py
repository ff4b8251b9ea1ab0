"""Memory of this machine and of running processes: limits, use, and why the kernel killed a process."""

import functools
import resource
from contextlib import suppress
from pathlib import Path

from meshwright.machine import field_of, limited_groups, memory_there

GB = 1e9
ADVICE = "use a smaller training.micro_batch, training.recompute=full, or shard over more ranks"
FULL, WAITS = 0.9, 5.0
"""Fraction of memory in use, and percentage of time that processes wait for memory, above which runs report them."""


class MemoryWatch:
    """The memory of some processes on this machine; `root` is where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = self._count()
        self._held: dict[int, int] = {}

    def look(self, pid: int) -> None:
        """Record the memory of process `pid`."""
        if held := field_of(self._root / f"proc/{pid}/status", "VmRSS:"):
            self._held[pid] = held * 1024

    def explain(self, pid: int) -> str:
        """The likely reason why process `pid` was killed by SIGKILL; empty if it is not memory."""
        held, limit = self.of(pid)
        if not limit or (self._count() == self._kills and held < 0.9 * limit):
            return ""
        return (
            f", most likely by the kernel because memory ran out: it held {held / GB:.1f} GB of {limit / GB:.1f} "
            f"GB; {ADVICE}"
        )

    def of(self, pid: int) -> tuple[int, int]:
        """Bytes that process `pid` held at the last look, and bytes that exist."""
        return self._held.get(pid, 0), memory_there(self._root)

    def _count(self) -> int:
        """How many processes the kernel has killed for lack of memory since the machine started."""
        return field_of(self._root / "proc/vmstat", "oom_kill")


def resident(root: Path = Path("/")) -> int:
    """Bytes of this process's resident set."""
    return field_of(root / "proc/self/status", "VmRSS:") * 1024


LIMITS = {resource.RLIMIT_AS: "VmSize:", resource.RLIMIT_DATA: "VmData:"}
"""Limits of a process (`ulimit -v`, `ulimit -d`), and the entries of /proc/self/status that they apply to."""


@functools.cache
def bare_addresses(kind: int) -> int:
    """Bytes that a limit counts although they are unused, at the first call; later a process also has addresses of
    freed memory."""
    return field_of(Path("/proc/self/status"), LIMITS[kind]) * 1024 - resident()


def memory_room(ranks: int) -> int:
    """Bytes that each of `ranks` processes here can use: its share of the machine or control group, or its own limit if
    that is lower."""
    room = [memory_there() // max(1, ranks)]
    for kind in LIMITS:
        limit, bare = resource.getrlimit(kind)[0], bare_addresses(kind)
        if limit != resource.RLIM_INFINITY:
            room.append(limit - bare)
    return min(room)


def memory_free(root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate: the minimum over the machine, its control groups and its own
    limits."""
    free = [memory_for_files(root)]
    for kind, entry in LIMITS.items():
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            free.append(limit - field_of(root / "proc/self/status", entry) * 1024)
    return max(0, min(free))


def memory_for_files(root: Path = Path("/")) -> int:
    """Bytes of memory that this machine and this process's control groups have free, also for the page cache."""
    free = [field_of(root / "proc/meminfo", "MemAvailable:") * 1024]
    free += [group.limit - group.used for group in limited_groups(root)]
    return max(0, min(free))


def host_pressure(root: Path = Path("/")) -> str:
    """`host 94% full, waits 12%` if this machine or control group has little memory left, or if processes have waited
    for memory in the last ten seconds; else empty."""
    total = field_of(root / "proc/meminfo", "MemTotal:") * 1024
    used = [(total - field_of(root / "proc/meminfo", "MemAvailable:") * 1024) / total] if total else []
    used += [group.used / group.limit for group in limited_groups(root)]
    full, waits = max(used, default=0.0), 0.0
    with suppress(OSError, ValueError, IndexError):
        waits = float((root / "proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
    parts = [f"host {full:.0%} full"] if full >= FULL else []
    parts += [f"{'' if parts else 'host '}waits {waits:.0f}%"] if waits >= WAITS else []
    return ", ".join(parts)
