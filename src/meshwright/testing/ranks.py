"""A pool of worker processes, so that cases with several ranks start fast."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import staged  # noqa: F401  (gives torch its backend)
from meshwright.testing.poison import fill_uninitialized_memory

MOST_THREADS = 200
"""Number of threads at which a rank is replaced. Every gloo group has three, and one of them wakes a hundred times a
second even when idle: a thousand of them keep two cores busy."""

LOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "meshwright.trainer.setup")
"""Modules that every rank would load."""

GRACE = 5
"""Seconds that the other ranks have once one has failed: most of them wait for it, for ever."""

STOPS = sys.platform == "linux"
"""Whether processes are stopped between cases."""

PR_SET_PDEATHSIG = 1
"""A constant of <linux/prctl.h>."""


def preload(modules: Iterable[str]) -> None:
    """Load these modules, with the functions that ranks will run, once in the process that ranks are forked from.

    Starts that process, so call it before the first pool has a group.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*LOADED, *sorted(modules)])
    forkserver.ensure_running()


class RankPool:
    """Groups of waiting ranks, one group per world size, started on first use and then reused.

    On Linux an idle group is stopped, so that its gloo threads do not wake either. A group lives as long as its
    processes: gloo's threads outlive a destroyed group if a mesh is still cached, and spin after their peers are gone.
    So processes with too many threads are replaced.
    """

    def __init__(self, backend: str = "gloo", *, fresh: bool = False) -> None:
        """`fresh`: ranks are new processes instead of forks, which a GPU's libraries do not survive. A group of one
        rank exists only over another backend than gloo."""
        self._groups: dict[int, _Group] = {}
        self._backend, self._fresh = backend, fresh
        atexit.register(self.close)  # else multiprocessing would wait for stopped processes to end

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """The results of `function(*args)` on each of `world_size` ranks, in rank order.

        `function` must be importable by its module's name. Raises `RuntimeError` with the tracebacks of the ranks that
        failed; their group is ended, because the others may hang, and the next call starts a new one.
        """
        if world_size not in self._groups:
            self._groups[world_size] = _Group(world_size, self._backend, fresh=self._fresh)
        group = self._groups[world_size]
        answers = group.ask(function, args, timeout)
        failures = [f"rank {rank} of {world_size}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures or group.is_worn:
            self._groups.pop(world_size).close()
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End all processes."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


class _Group:
    """The processes of one world size."""

    def __init__(self, world_size: int, backend: str, *, fresh: bool) -> None:
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        context.set_forkserver_preload([*LOADED])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(rank, world_size, backend, store, there, fresh), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[tuple[bool, Any]]:
        self._send(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[Connection, tuple[bool, Any]] = {}
        ends = time.monotonic() + timeout
        while missing := [pipe for pipe in self._pipes if pipe not in answers]:
            ready = wait(missing, max(0, ends - time.monotonic()))
            answers |= {pipe: self._answer(pipe) for pipe in missing if pipe in ready}
            if not ready:
                answers |= dict.fromkeys(
                    missing, (False, f"no answer within {timeout} s, or {GRACE} s of another rank's failure")
                )
            if not all(ok for ok, _ in answers.values()):
                ends = min(ends, time.monotonic() + GRACE)
        self._send(signal.SIGSTOP)
        return [answers[pipe] for pipe in self._pipes]

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes if STOPS else ():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # its answer reports its death
                os.kill(process.pid, number)

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except EOFError:
            process = self._processes[self._pipes.index(pipe)]
            process.join(5)
            return False, f"the process died with status {process.exitcode}"

    @property
    def is_worn(self) -> bool:
        """Whether the first rank, and so each, has more than `MOST_THREADS`; never if there is no /proc."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.is_dir() and len(list(tasks.iterdir())) > MOST_THREADS

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Connection, fresh: bool) -> None:
    if STOPS:
        # A stopped process does not notice that its pipe has closed. So it is killed when the fork server ends, which
        # exits with its parent unless one of its children keeps it alive.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not fresh:
            os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    gc.freeze()  # a collection would copy the memory that all ranks share
    torch.set_num_threads(1)
    fill_uninitialized_memory()
    if world_size > 1 or backend != "gloo":
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # a failed checkpoint load raises one that is not an Exception
            pipe.send((False, traceback.format_exc()))
