"""The report after an out-of-memory error: expected and held memory, the cheapest changes that would fit, and a restart
with the first of them (`--retry-oom`)."""

import errno
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from meshwright.launch.memory import memory_room, memory_there, resident
from meshwright.launch.status import OUT_OF_MEMORY, OutOfMemoryError, RunError
from meshwright.machine import Machine, find_machine
from meshwright.predict.forecast import forecast
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.storage.durable import write_json
from meshwright.terminal import printable
from meshwright.trainer import held as kinds
from meshwright.trainer.held import HeldMemory, held
from meshwright.trainer.remedies import remedies, remedy_lines
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import AUTO

GB = 1e9
PAGE = "out-of-memory.json"
"""File in run_dir with the page and its remedies."""
LARGEST = 5
"""Tensors that are named."""
MOST_RETRIES = 4
"""The maximum number of restarts; every remedy needs less memory than the one before."""
RETRY = "--retry-oom, in Python retry_oom=True"
"""The option and the argument of `train`: a worker does not know which of them started it."""
REFUSED = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|_STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""The messages of allocators: torch's on a CPU, CUDA's and its libraries' (cuBLAS, cuDNN), the system's."""
SIZE_REQUESTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SAVING, BUILDING, KILLED = "saving", "building the model", "killed by the kernel"
PHASES = (
    ("meshwright/trainer/saver.py", SAVING),
    ("meshwright/trainer/samples.py", "writing samples"),
    ("meshwright/trainer/evaluate.py", "an evaluation"),
    ("meshwright/trainer/state.py", "reading a checkpoint"),
    ("meshwright/callbacks/", "a callback"),
    ("torch/autograd/__init__.py", "the backward pass"),
    ("meshwright/state/", "the optimizer's step"),
    ("meshwright/optim/", "the optimizer's step"),
    ("meshwright/trainer/setup.py", BUILDING),
    ("meshwright/data/", "reading data"),
    ("meshwright/trainer/step.py", "the forward pass"),
)
"""The phase is set by the first of these files in the error's stack."""
ROWS = {
    kinds.WEIGHTS: "weights",
    kinds.GRADIENTS: "gradients",
    kinds.OPTIMIZER: "optimizer",
    kinds.COMMUNICATION: "communication",
    kinds.ACTIVATIONS: "activations",
    kinds.TEMPORARIES: "logits",
    kinds.OTHER: "fragmentation",
    kinds.PROCESS: "context",
}
"""Kinds of held memory -> kinds of planned memory."""
SYNCHRONOUS = "checkpoint.asynchronous=false"
"""Writes a checkpoint without a copy of it in memory."""


@dataclass
class OutOfMemoryState:
    """Where and when a rank ran out of memory, and what it held; built before anything is freed."""

    rank: int
    phase: str
    step: int = 0
    place: str = ""
    """The module that computed."""
    request: float = 0.0
    """Bytes of the refused allocation; 0 if the allocator does not report them."""
    held: HeldMemory = field(default_factory=lambda: HeldMemory({}))
    limit: float = 0.0
    """Bytes available to the rank; 0: computed from this machine's memory."""

    @property
    def words(self) -> str:
        """The moment in a line."""
        request = f": {self.request / GB:.3g} GB more could not be allocated" if self.request else ""
        step = f"step {self.step}" if self.step else ""
        return ", ".join(filter(None, (f"rank {self.rank}", step, self.phase, self.place))) + request


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator on the device or the host has refused an allocation."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(REFUSED.search(str(error)))


def moment_of(error: BaseException, rank: int, trainer: Trainer | None) -> OutOfMemoryState:
    """The report of the current exception; `trainer` is None if it was not built."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    phase = next((name for part, name in PHASES if any(part in file for file in files)), BUILDING)
    match = SIZE_REQUESTED.search(str(error))
    moment = OutOfMemoryState(rank, phase, request=float(match[1]) * UNITS[match[2]] if match else 0.0)
    if trainer is not None:
        moment.step, moment.place = trainer.step, _module(error.__traceback__, trainer.model)
        try:
            moment.held = held(trainer, error.__traceback__)
        except Exception as problem:  # no error here may hide the original one
            moment.place += f" (held memory is unknown: {problem!r})"
        if trainer.device.type == "cpu":
            moment.limit = room(trainer.resolved, trainer.machine)
            if moment.limit < memory_there() // trainer.worker.local_world_size:  # the process has its own limit
                moment.limit = min(moment.limit, sum(moment.held.kinds.values()) + moment.request)
    return moment


def _module(trace: TracebackType | None, model: nn.Module) -> str:
    """The name of the innermost of the model's modules that computed."""
    names, innermost = {id(module): name for name, module in model.named_modules()}, ""
    while trace is not None:
        innermost = names.get(id(trace.tb_frame.f_locals.get("self")), "") or innermost
        trace = trace.tb_next
    return innermost


def page_of(resolved: ResolvedRun, moment: OutOfMemoryState, run_dir: Path | None = None) -> OutOfMemoryError:
    """The page about a moment; also written to `run_dir`, with the remedies."""
    lines, changes = [f"out of memory: {moment.words}"], list[tuple[str, ...]]()
    try:
        machine = find_machine(resolved.run.device)
        limit = moment.limit or room(resolved, machine)
        resolved = on_this_machine(resolved, machine)
        expected = forecast(resolved, machine).memory.kinds()
        lines += _table(expected, moment.held, limit)
        fitting = remedies(resolved, machine, limit)
        changes, advice = [remedy.overrides for remedy in fitting], remedy_lines(fitting)
    except (UserError, ValueError) as error:  # the planner does not support this machine or model
        advice = [f"no plan is possible: {error}"]
    if moment.phase == SAVING and resolved.run.checkpoint.asynchronous:
        changes.insert(0, (SYNCHRONOUS,))
        advice.insert(0, f"{SYNCHRONOUS}  no second copy of the state; training waits while the checkpoint is written")
    lines.append(f"predicted to fit, fastest first ({RETRY}: restarts with the first):")
    lines += [f"  {line}" for line in advice]
    if run_dir is not None and run_dir.is_dir():
        write_json(run_dir / PAGE, {"time": time.time(), "page": lines, "remedies": changes})
    return OutOfMemoryError("\n".join(lines))


def room(resolved: ResolvedRun, machine: Machine) -> float:
    """Bytes available to a rank on this machine."""
    ranks = min(resolved.run.layout.world_size, machine.devices)
    return machine.memory_per_rank(ranks) if machine.is_gpu else memory_room(ranks)


def on_this_machine(resolved: ResolvedRun, machine: Machine) -> ResolvedRun:
    """The run as it is planned for this machine: a CPU has the costs of a CPU even if the recipe names a cluster of
    GPUs."""
    if machine.kind != "cpu":
        return resolved
    return resolved.model_copy(update={"run": resolved.run.model_copy(update={"cluster": "local"})})


def shortage(resolved: ResolvedRun) -> str:
    """`2.26 GB expected of 1.47 GB a rank` if the run is predicted to need more memory than there is; else empty."""
    machine = find_machine(resolved.run.device)
    try:
        expected = sum(forecast(on_this_machine(resolved, machine), machine).memory.kinds().values())
    except (UserError, ValueError):  # the planner does not support this machine or model
        return ""
    limit = room(resolved, machine)
    return f"{expected / GB:.2f} GB expected of {limit / GB:.2f} GB a rank" if expected > limit else ""


def _table(expected: dict[str, float], held: HeldMemory, limit: float) -> Iterator[str]:
    """Expected and held memory by kind; activations by layer; the largest tensors."""
    there = held.kinds
    yield f"{'':28}{'expected':>10}{'held then' if there else '':>12}"
    for kind, planned in ROWS.items():
        size = expected[planned]
        if size or there.get(kind):
            yield f"  {kind:<26}{_size(size)}" + (f"  {_size(there[kind])}" if there else "")
    total = f"  {_size(sum(there.values()))}" if there else ""
    yield f"  {'total':<26}{_size(sum(expected.values()))}{total}  of {limit / GB:.3f} GB a rank"
    if held.layers:
        yield f"activations of layers: {', '.join(_runs(held.layers))}"
    if held.largest:
        named = [f"{name} {size / GB:.3f} GB ({kind})" for size, name, kind in held.largest[:LARGEST]]
        yield "largest tensors:"
        yield from (f"  {line}" for line in named)


def _size(size: float) -> str:
    return f"{size / GB:>7.3f} GB"


def _runs(layers: dict[str, int]) -> Iterator[str]:
    """`layers.0 to 14 0.120 GB each` for layers of equal size, to the megabyte."""
    order = sorted((int(name.rpartition(".")[2]), size) for name, size in layers.items() if name != kinds.OUTSIDE)
    groups: list[tuple[int, int, int]] = []
    for number, size in order:
        if groups and groups[-1][1] == number - 1 and abs(groups[-1][2] - size) < 1e6:
            groups[-1] = groups[-1][0], number, groups[-1][2]
        else:
            groups.append((number, number, size))
    for first, last, size in groups:
        yield f"{first}{f' to {last}' if last > first else ''} {size / GB:.3f} GB{' each' if last > first else ''}"
    if outside := layers.get(kinds.OUTSIDE):
        yield f"{kinds.OUTSIDE} {outside / GB:.3f} GB"


def page_of_killed(resolved: ResolvedRun, run_dir: Path, rank: int, held_bytes: int, there: int) -> str:
    """The report for a rank that the kernel has killed; its launcher writes it."""
    machine = find_machine(resolved.run.device)
    ranks = min(resolved.run.layout.world_size, machine.devices)
    moment = OutOfMemoryState(rank, f"{KILLED} while it held {held_bytes / GB:.3g} GB")
    moment.limit = 0.0 if machine.is_gpu else (there - resident()) / ranks  # beside this launcher
    return str(page_of(resolved, moment, run_dir))


def was_killed(run_dir: Path) -> bool:
    """Whether the last report of a run is about a rank that the kernel killed."""
    return KILLED in read_page(run_dir)[0]


def read_page(run_dir: Path) -> tuple[str, Sequence[Sequence[str]]]:
    """The last report of a run and its remedies, each as overrides; empty if there is none."""
    try:
        text = regular(run_dir / PAGE).read_text()
        return text, json.loads(text)["remedies"]
    except (OSError, ValueError, KeyError):
        return "", []


class Attempts:
    """The attempts of a run, each a recipe and what to resume from: one; with `retry`, after each that runs out of
    memory, one with a remedy. A remedy never changes the global batch or the order of samples."""

    def __init__(self, run: Run, resume: str | None, *, retry: bool, alone: bool = True) -> None:
        """Raises `UserError` if this process cannot restart a run, because another launcher started it (`alone` is
        false)."""
        if retry and not alone:
            raise UserError(
                "--retry-oom: another launcher started this process, and only that launcher can restart all processes; "
                "start meshwright train once on each machine"
            )
        self._run, self._resume, self._retry = run, resume, retry
        self.status = 0
        """The last attempt's exit status; set it before the next one."""

    def __iter__(self) -> Iterator[tuple[Run, str | None]]:
        run, resume, run_dir = self._run, self._resume, Path(self._run.run_dir)
        tried = set[tuple[str, ...]]()
        while True:
            before, _ = read_page(run_dir)
            yield run, resume
            if self.status != OUT_OF_MEMORY or not self._retry:
                return
            page, remedies = read_page(run_dir)
            fresh = [tuple(overrides) for overrides in remedies] if page != before else []
            chosen = next((overrides for overrides in fresh if overrides not in tried), None)
            if chosen is None or len(tried) == MOST_RETRIES:
                print(f"error: no further change to try ({RETRY})", file=sys.stderr, flush=True)
                return
            tried.add(chosen)
            print(f"starting again with {shlex.join(chosen)} ({RETRY})", file=sys.stderr, flush=True)
            run, resume = parse_spec(dump_recipe(run), Run, chosen), AUTO


def print_error(error: RunError) -> int:
    """Print the error; returns its exit status."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
    return error.status
