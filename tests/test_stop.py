"""A signal to any one process, in any phase, leads to one agreed step, one save, one exit status; a second one ends."""

import ctypes
import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.launch.signals import ECHO_SECONDS, PARENT_SECONDS, StopRequest, end_with
from meshwright.launch.status import STOPPED, TrainingStopped
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import EvaluationSpec
from meshwright.testing.equivalence import build_here
from meshwright.testing.faults import run_in_fork
from meshwright.testing.ranks import RankPool
from meshwright.trainer import evaluate
from meshwright.trainer.display import Display
from meshwright.trainer.loop import train_loop
from meshwright.trainer.metrics import MetricsJournal, read_journal
from meshwright.trainer.saver import Saver
from meshwright.trainer.session import Outputs, Session
from tiny import STRATEGIES, tiny_corpus, tiny_run

# ---- one process


def end_of(work: Any) -> int:
    """Exit status of a forked worker that runs `work` between a signal and its end."""

    def in_child() -> None:
        with StopRequest(raises=False) as stop:
            work(stop)

    return run_in_fork(in_child)


def before_the_first_step(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def deep_in_a_call(stop: StopRequest) -> None:
    """In C code that never returns to Python, as in a collective that waits for other ranks."""
    os.kill(os.getpid(), signal.SIGUSR1)
    while True:
        ctypes.CDLL(None).usleep(1000000)


def twice(stop: StopRequest) -> None:
    stop.running()
    for _ in range(3):  # the echoes of one request
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ECHO_SECONDS + 0.2)
    if stop.number != signal.SIGTERM:
        os._exit(1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def terminal_closed(stop: StopRequest) -> None:
    """The terminal is closed, so writing to it is an error; the run continues to its next agreed step."""
    stop.running()
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.2)
    print("nobody reads this", flush=True)
    os._exit(0 if stop.number == signal.SIGHUP else 1)


def never(stop: StopRequest) -> None:
    stop.running()


def with_its_parent(stop: StopRequest) -> None:
    stop.running()
    end_with(os.getppid())
    time.sleep(2 * PARENT_SECONDS)


def without_its_parent(stop: StopRequest) -> None:
    end_with(os.getpid())  # this process is certainly not its own child
    time.sleep(10)


def without_its_parent_or_a_reader(stop: StopRequest) -> None:
    """The reader of its errors has ended with its parent."""
    reading, writing = os.pipe()
    os.dup2(writing, sys.stderr.fileno())
    os.close(reading)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    end_with(os.getpid())
    time.sleep(10)


def statuses() -> list[int]:
    works = (
        before_the_first_step,
        deep_in_a_call,
        twice,
        terminal_closed,
        never,
        with_its_parent,
        without_its_parent,
        without_its_parent_or_a_reader,
    )
    return [end_of(work) for work in works]


def test_what_a_worker_does_when_it_hears_a_signal(ranks: RankPool) -> None:
    lost = 128 + signal.SIGHUP
    assert ranks.run(1, statuses) == [[STOPPED, STOPPED, 128 + signal.SIGINT, 0, 0, 0, lost, lost]]


def test_the_process_that_people_started_is_interrupted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStopped) as stopped, StopRequest(raises=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.status == STOPPED
    with StopRequest(raises=True) as stop:
        stop.running()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.number == signal.SIGUSR1
        time.sleep(ECHO_SECONDS + 0.1)
        with pytest.raises(TrainingStopped) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped.value.status == 130
    assert signal.getsignal(signal.SIGTERM) == before


# ---- several ranks: the loop itself


def tiny(strategy: str, *, compiled: bool = False) -> ResolvedRun:
    run = tiny_run(STRATEGIES[strategy], precision="fp32", steps=6, compile=compiled)
    training = run.run.training.model_copy(update={"evaluation": EvaluationSpec(every=2, batches=2)})
    update = {"training": training, "checkpoint": CheckpointSpec(every=2, keep_last=9)}
    return run.model_copy(update={"run": run.run.model_copy(update=update)})


def train_and_signal(run: ResolvedRun, root: Path, phase: str) -> tuple[int, list[str], list[tuple[str, int]]]:
    """Train on random tokens while only the last rank is signalled in a phase. Collective."""
    really_compile, signalled = torch.compile, False

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        hit()
        return graph.forward

    torch.compile = partial(really_compile, backend=compiler)
    trainer = build_here(run)
    torch.compile = really_compile

    def hit() -> None:
        nonlocal signalled
        if trainer.worker.rank == trainer.worker.world_size - 1 and not signalled:
            signalled = True
            os.kill(os.getpid(), signal.SIGUSR1)

    owner, name = {
        "first step": (trainer.train_step, "accumulate"),
        "evaluation": (evaluate, "evaluate"),
        "save": (Saver, "_begin"),
    }.get(phase, (trainer.train_step, "update"))
    really = getattr(owner, name)

    def hitting(*args: Any, **kwargs: Any) -> Any:
        if phase not in ("compilation", "step") or (phase == "step" and trainer.step == 3):
            hit()
        return really(*args, **kwargs)

    display = Display(steps=6, memory_bytes=1, device="cpu", enabled=False)
    first = trainer.worker.rank == 0
    with (
        StopRequest(raises=False) as stop,
        MetricsJournal(root / "metrics.jsonl") if first else nullcontext() as journal,
    ):
        stop.running()
        setattr(owner, name, hitting)
        try:
            corpus = tiny_corpus(held_out=True)
            number = train_loop(Session(trainer, corpus, Outputs(root, display, journal), stop))
        finally:
            setattr(owner, name, really)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)
    if dist.is_initialized():
        dist.barrier()
    records = read_journal(root / "metrics.jsonl")
    seen = [(record["kind"], record["step"]) for record in records if record["kind"] != "step"]
    return number, [path.name for path in list_checkpoints(root / "checkpoints")], seen


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "zero-3"])
@pytest.mark.parametrize(
    ("phase", "stopped_at"), [("compilation", 1), ("first step", 1), ("step", 3), ("evaluation", 2), ("save", 2)]
)
def test_a_signal_to_one_rank_in_any_phase(
    ranks: RankPool, tmp_path: Path, strategy: str, phase: str, stopped_at: int
) -> None:
    run = tiny(strategy, compiled=phase == "compilation")
    for number, checkpoints, seen in ranks.run(run.run.layout.world_size, train_and_signal, run, tmp_path, phase):
        assert number == signal.SIGUSR1
        assert checkpoints[-1] == f"step-{stopped_at:08d}"
        assert seen.count(("checkpoint", stopped_at)) == 1  # one save of the agreed step
        assert max(step for _, step in seen) == stopped_at
        assert (("evaluation", 2) in seen) == (phase in ("step", "save"))  # a partial evaluation does not count
