"""The one place that keeps worker processes at hand, so that many cases with several ranks cost little each."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankPool:
    """Processes that wait for work; `run` makes some of them the ranks of a fresh gloo group for one function call."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "meshwright.trainer.setup"])
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """What `function(*args)` returned on each of `world_size` ranks, in rank order.

        `function` must be importable by its module's name. Raises `RuntimeError` with the traceback of the first rank
        that failed; a rank that died or hangs takes the pool with it.
        """
        self._cases += 1
        store = Path(self._folder.name) / str(self._cases)
        for pipe in self._pipes[:world_size]:
            pipe.send((world_size, str(store), function, args))
        answers = [self._answer(rank, timeout) for rank in range(world_size)]
        failures = [f"rank {rank} of {world_size}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            self.close()
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, rank: int, timeout: float) -> tuple[bool, Any]:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            if pipe.poll(timeout):
                return pipe.recv()
        except EOFError:
            process.join(5)
            return False, f"the process died with status {process.exitcode}"
        return False, f"no answer within {timeout} s"

    @property
    def alive(self) -> bool:
        """Whether every process still waits for work."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            world_size, store, function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, _as_rank(rank, world_size, store, function, args)))
        except BaseException:  # a failed checkpoint load raises one that is no Exception
            pipe.send((False, traceback.format_exc()))


def _as_rank(rank: int, world_size: int, store: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    if world_size == 1:
        return function(*args)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    result = function(*args)
    gc.collect()  # meshes live in reference cycles; a group that outlives its peers leaves gloo's threads spinning
    dist.barrier()  # a rank that leaves early makes gloo abort the others
    dist.destroy_process_group()
    return result
