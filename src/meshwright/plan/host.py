"""Memory of this machine, and the limits that its control groups set."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def memory_there(root: Path = Path("/")) -> int:
    """Bytes of memory of this machine, or of this process's control group if that has less."""
    physical = field_of(root / "proc/meminfo", "MemTotal:") * 1024
    physical = physical or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # without /proc
    return min([physical, *(group.limit for group in limited_groups(root))])


@dataclass(frozen=True)
class Group:
    """A control group with a limit of memory."""

    limit: int
    """Bytes."""
    used: int
    """Bytes in use, without the page cache that the kernel would take back first."""


VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers of a line in /proc/self/cgroup (cgroups(7)): the folder below /sys/fs/cgroup, the files of limit
and use, and the entry of memory.stat. Version 2 has one tree; version 1 has one per controller."""


def limited_groups(root: Path) -> list[Group]:
    """The control groups with a limit that this process is in."""
    found, lines = [], []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in VERSIONS:
            continue
        tree, limit, use, cache = VERSIONS[controllers]
        place = root / "sys/fs/cgroup" / tree / group.strip("/")
        for folder in (place, *place.parents):
            with suppress(OSError, ValueError):  # without a limit version 2 says "max"
                allowed, used = (int((folder / name).read_text()) for name in (limit, use))
                found.append(Group(allowed, used - field_of(folder / "memory.stat", cache)))
    return found


def field_of(file: Path, name: str) -> int:
    """The number after `name` at the start of a line; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith((f"{name} ", f"{name}\t")):
                return int(line.split()[1])
    return 0
