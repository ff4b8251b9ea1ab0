"""The memory of running workers, recorded to explain later why the kernel killed one."""

from contextlib import suppress
from pathlib import Path

GB = 1e9
ADVICE = "a smaller training.micro_batch, training.recompute=full or more ranks to shard over need less"


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
        held, limit = self._held.get(pid, 0), self._limit()
        if not limit or (self._count() == self._kills and held < 0.9 * limit):
            return ""
        return (
            f", most likely by the kernel, out of memory: it held {held / GB:.1f} GB of {limit / GB:.1f} GB; {ADVICE}"
        )

    def _count(self) -> int:
        """How many processes the kernel has ended for want of memory since the machine started."""
        return field_of(self._root / "proc/vmstat", "oom_kill")

    def _limit(self) -> int:
        """Bytes of memory of this machine, or of the control group that this process is in where that is less."""
        limits = [field_of(self._root / "proc/meminfo", "MemTotal:") * 1024]
        with suppress(OSError):
            group = (self._root / "proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].strip("/")
            place = self._root / "sys/fs/cgroup" / group
            for folder in (place, *place.parents):
                with suppress(OSError, ValueError):
                    limits.append(int((folder / "memory.max").read_text()))
        return min(limits)


def field_of(file: Path, name: str) -> int:
    """The number behind `name` at the beginning of a line; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith((f"{name} ", f"{name}\t")):
                return int(line.split()[1])
    return 0
