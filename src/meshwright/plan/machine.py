"""The devices and the memory of this machine, found without torch, within the limits of its control groups."""

import functools
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from meshwright.spec.errors import UserError


@dataclass(frozen=True)
class Machine:
    """This machine's identical devices, one process each."""

    kind: Literal["cpu", "cuda"]
    name: str
    """Product name of a GPU, or `cpu`."""
    devices: int
    """Number of GPUs, or of CPU cores."""
    memory_bytes: int
    """Memory of one GPU, or of the whole machine."""
    host_memory_bytes: int = 0
    """Host memory beside GPUs; 0 if unknown."""

    def memory_per_rank(self, local_ranks: int) -> int:
        """Bytes that each of `local_ranks` processes on this machine can count on."""
        return self.memory_bytes if self.kind == "cuda" else self.memory_bytes // max(1, local_ranks)

    def host_per_rank(self, ranks: int) -> float:
        """Bytes of host memory beside GPUs that each of a run's processes here can count on; endless if unknown, and on
        a CPU, whose memory is the device's."""
        known = self.kind == "cuda" and self.host_memory_bytes > 0
        return self.host_memory_bytes / max(1, min(ranks, self.devices)) if known else inf


@functools.cache
def find_machine(device: str = "auto") -> Machine:
    """The machine as `device` (auto, cpu, cuda) sees it; raises `UserError` where cuda is asked for and missing."""
    gpus = [] if device == "cpu" else _gpus()
    if gpus:
        name, memory_bytes = gpus[0]
        host = memory_there()
        return Machine(kind="cuda", name=name, devices=len(gpus), memory_bytes=memory_bytes, host_memory_bytes=host)
    if device == "cuda":
        raise UserError("device=cuda, but nvidia-smi -L lists no NVIDIA GPU on this machine; use device=cpu")
    return Machine(kind="cpu", name="cpu", devices=len(os.sched_getaffinity(0)), memory_bytes=memory_there())


def _gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of every GPU that `nvidia-smi` lists; empty without that program."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return []
    rows = [line.rsplit(",", 1) for line in answer.stdout.splitlines() if line.strip()]
    return [(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]


def memory_there(root: Path = Path("/")) -> int:
    """Bytes of memory of this machine, or of this process's control group if that has less."""
    physical = field_of(root / "proc/meminfo", "MemTotal:") * 1024
    physical = physical or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # without /proc
    return min([physical, *(group.limit for group in limited_groups(root))])


@dataclass(frozen=True)
class ControlGroup:
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


def limited_groups(root: Path) -> list[ControlGroup]:
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
                found.append(ControlGroup(allowed, used - field_of(folder / "memory.stat", cache)))
    return found


def field_of(file: Path, name: str) -> int:
    """The number after `name` at the start of a line; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith((f"{name} ", f"{name}\t")):
                return int(line.split()[1])
    return 0
