"""Work in forked processes: torch is imported once for a whole campaign, and a fault is planted when its module is
imported.

A forked process has never computed anything, because torch's threads do not survive a fork. So ranks are forked before
the process that uses them computes its reference.
"""

import ctypes
import importlib
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

OURS = ("meshwright", "mutants", "tiny", "conftest")
"""Modules that a child imports itself."""

CONTEXT = multiprocessing.get_context("fork")

PR_SET_PDEATHSIG = 1
"""A constant of <linux/prctl.h>."""


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process forked to compute `function(*args)`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.connection, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_report, args=(there, function, args))
        self.process.start()
        there.close()

    def result(self, timeout: float) -> Any:
        """Its return value; `RuntimeError` with its traceback, or if it is silent for `timeout` seconds."""
        ok, value = False, f"no answer within {timeout} s"
        try:
            if self.connection.poll(timeout):
                ok, value = self.connection.recv()
        except EOFError:
            value = "the process died"
        self.end()
        if not ok:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        """End it and all processes that it started."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _report(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _die_with_parent()
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)


def import_others(function: Callable[..., Any], *args: Any) -> None:
    """Import every module that is not ours and that `function(*args)` needs; a child finds them by calling it."""
    for name in Child(_others, function, args).result(600):
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except ImportError:  # a part of a module, listed as a module
                continue


def _others(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    function(*args)
    return [name for name in sys.modules if name.split(".")[0] not in (*OURS, "__main__")]


def plant(file: Path, old: str, new: str, package: Path) -> None:
    """Make this process import `file` with `old` replaced by `new`; `ValueError` if `old` does not occur exactly once.

    `package`: the folder that contains the packages.
    """
    text = file.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} has the text {text.count(old)} times")
    name = ".".join(file.relative_to(package).with_suffix("").parts)
    if name in sys.modules:
        raise ValueError(f"{name} is imported already")
    code = compile(text.replace(old, new), str(file), "exec", dont_inherit=True)
    sys.meta_path.insert(0, _Planted(name, file, code))


class _Planted:
    """Finds one module, with the given source."""

    def __init__(self, name: str, file: Path, code: CodeType) -> None:
        self.name, self.file, self.code = name, file, code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Loader(name, str(self.file))
        loader.code = self.code
        return importlib.util.spec_from_file_location(name, self.file, loader=loader)


class _Loader(SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


SECONDS = 600
"""Time for ranks' proof, after which they count as hung."""


class ForkedRanks:
    """Gloo ranks forked from this process, with the interface of `testing.ranks.RankPool`."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-mutant-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = CONTEXT.Pipe()
            arguments = rank, world_size, str(Path(self._folder.name) / "store"), there
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(*args)` on each rank; `RuntimeError` with the tracebacks of those that failed or
        hang."""
        assert world_size == len(self._pipes)
        for pipe in self._pipes:
            pipe.send((function, args))
        end = time.monotonic() + SECONDS
        answers = [self._answer(pipe, end) for pipe in self._pipes]
        failures = [f"rank {rank} of {world_size}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, pipe: Connection, end: float) -> tuple[bool, Any]:
        try:
            in_time = pipe.poll(max(1, end - time.monotonic()))
            return pipe.recv() if in_time else (False, f"no answer within {SECONDS} s")
        except EOFError:
            return False, "the process died"

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    _die_with_parent()
    torch = importlib.import_module("torch")  # the parent has imported it
    dist = torch.distributed
    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        if world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
