"""The devices and the memory of this machine, found without torch, within the limits of its control groups."""

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Literal

from meshwright.spec.errors import UserError

Ask = Callable[[list[str]], str | None]
"""A command -> its output; None if it cannot be run."""


@dataclass(frozen=True)
class Machine:
    """This machine's identical devices, one process each."""

    kind: Literal["cpu", "gpu"]
    name: str
    """Product name of a GPU, or `cpu`."""
    devices: int
    """Number of GPUs, or of CPU cores."""
    memory_bytes: int
    """Memory of one GPU, or of the whole machine."""
    host_memory_bytes: int = 0
    """Host memory beside GPUs; 0 if unknown."""
    note: str = ""
    """A warning about its GPUs."""
    shared: bool = False
    """Whether several processes use each GPU."""

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return self.kind != "cpu"

    def memory_per_rank(self, local_ranks: int) -> int:
        """Bytes that each of `local_ranks` processes on this machine can count on."""
        if self.is_gpu:
            return self.memory_bytes // (max(1, ceil(local_ranks / self.devices)) if self.shared else 1)
        return self.memory_bytes // max(1, local_ranks)

    def host_per_rank(self, ranks: int) -> float:
        """Bytes of host memory beside GPUs that each of a run's processes here can count on; endless if unknown, and on
        a CPU, whose memory is the device's."""
        known = self.is_gpu and self.host_memory_bytes > 0
        return self.host_memory_bytes / max(1, min(ranks, self.devices)) if known else inf


@functools.cache
def find_machine(device: str = "auto") -> Machine:
    """The machine as the recipe's `device` sees it; raises `UserError` if it needs a GPU and there is none."""
    gpus, note = ([], "") if device == "cpu" else find_named(device) if device in NAMED else find_gpus()
    if gpus:
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        if len({gpu.name for gpu in gpus}) > 1:
            note = f"the GPUs differ: {', '.join(gpu.name for gpu in gpus)}; all are taken for {smallest.name}"
        shared = device == "cuda_shared"
        return Machine("gpu", smallest.name, len(gpus), smallest.memory_bytes, memory_there(), note, shared)
    if device in ("cuda", "cuda_shared", *NAMED):
        raise UserError(f"device={device}, but {note or 'this machine has no GPU'}; use device=cpu")
    return Machine("cpu", "cpu", cores_there(), memory_there(), note=note)


def cores_there() -> int:
    """Processor cores that this process may use; of the whole machine where the system does not tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor(root: Path = Path("/")) -> str:
    """The processor's name and a digest of its instruction sets; the architecture where the system tells no more."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    known = sorted({line for line in lines if line.startswith(PROCESSOR)})
    names = [line.partition(":")[2].strip() for line in known if line.startswith("model name")]
    digest = hashlib.sha256("/".join(known).encode()).hexdigest()[:6]
    return f"{names[0] if names else platform.machine()} {digest}"


PROCESSOR = ("model name", "flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo with the processor's name and instruction sets."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU (MIG), that processes here can use."""

    name: str
    memory_bytes: int


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs from programs, torch included."""
SIGNS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""Files of a GPU's driver: NVIDIA's, AMD's, and Windows' for its Linux subsystem."""
COLUMNS = "index,uuid,name,memory.total,mig.mode.current"
NAMED = {"xpu": "Intel GPU", "mps": "Apple GPU"}
"""GPUs that are used only where the recipe names them, because nobody has trained on one yet."""
ASK_TORCH = """
import json, torch
of, kind = torch.get_device_module(), torch.accelerator.current_accelerator()
if kind is None:
    gpus = []
elif hasattr(of, "get_device_properties"):
    gpus = [of.get_device_properties(i) for i in range(torch.accelerator.device_count())]
    gpus = [[gpu.name, gpu.total_memory] for gpu in gpus]
else:
    gpus = [["Apple GPU", of.recommended_max_memory()]]
print(json.dumps([torch.__version__, gpus, kind and kind.type]))
"""


def run_program(command: list[str]) -> str | None:
    """A program's output; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def find_gpus(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), ask: Ask = run_program
) -> tuple[list[Gpu], str]:
    """The visible GPUs, and a note if there are some that cannot be used.

    `nvidia-smi` answers in milliseconds. Where it is missing, or where its answer is not what torch sees (MIG slices,
    memory shared with the host, devices hidden by names), torch is asked in a process of its own, which takes seconds.
    """
    rows = _listed(ask)
    hidden = next((environment[name] for name in VISIBLE if name in environment), None)
    if rows and all(row[3].isdigit() and row[4] != "Enabled" for row in rows):
        chosen = _visible(rows, hidden)
        if chosen is not None:
            return [Gpu(row[2], int(row[3]) * 2**20) for row in chosen], ""
    signs = [sign for sign in SIGNS if (root / sign).exists()]
    if not rows and not signs:
        return [], ""
    answer = ask([sys.executable, "-P", "-c", ASK_TORCH])
    if answer is None:
        return [], "a GPU's driver is here, but torch cannot be asked for GPUs"
    version, seen, _ = json.loads(answer)
    hides = f" ({VISIBLE[0]}={hidden!r} hides others)" if hidden is not None else ""
    note = f"a GPU's driver is here, but torch {version} sees no GPU{hides}"
    return [Gpu(name, memory) for name, memory in seen], "" if seen else note


def find_named(device: str, ask: Ask = run_program) -> tuple[list[Gpu], str]:
    """The GPUs of `NAMED` that torch sees, and a note if there is none."""
    version, seen, kind = json.loads(ask([sys.executable, "-P", "-c", ASK_TORCH]) or '["", [], null]')
    if kind == device and seen:
        return [Gpu(name, memory) for name, memory in seen], ""
    return [], f"torch {version} sees no {NAMED[device]}".replace("  ", " ")


def _listed(ask: Ask) -> list[list[str]]:
    """The rows of `COLUMNS` that `nvidia-smi` lists, in the order of the bus."""
    answer = ask(["nvidia-smi", f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits"]) or ""
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(COLUMNS.split(","))]


def _visible(rows: list[list[str]], hidden: str | None) -> list[list[str]] | None:
    """The rows that CUDA leaves visible: numbers or UUIDs, up to the first that is none. None if it names something
    else, or if numbers may mean another order."""
    if hidden is None:
        return rows
    chosen = []
    for word in (part.strip() for part in hidden.split(",")):
        if word.startswith("MIG") or (word.isdigit() and len({row[2] for row in rows}) > 1):
            return None
        named = [row for row in rows if row[0] == word or (word.startswith("GPU-") and row[1].startswith(word))]
        if len(named) != 1:
            break
        chosen += named
    return chosen


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
    groups, lines = [], []
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
                groups.append(ControlGroup(allowed, used - field_of(folder / "memory.stat", cache)))
    return groups


def field_of(file: Path, name: str) -> int:
    """The number after `name` at the start of a line; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith((f"{name} ", f"{name}\t")):
                return int(line.split()[1])
    return 0
