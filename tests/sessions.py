"""Runs of tests in this process: tiny models on random tokens, with callbacks, through the training loop itself."""

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from meshwright.callbacks import Callback, named_callbacks
from meshwright.launch.signals import StopRequest
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import EvaluationSpec
from meshwright.testing.equivalence import build_here
from meshwright.testing.layouts import LAYOUTS
from meshwright.trainer.display import Display
from meshwright.trainer.loop import train_loop
from meshwright.trainer.metrics import MetricsJournal
from meshwright.trainer.session import Outputs, Session
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import restore
from tiny import tiny_corpus, tiny_run

STEPS = 6


def tiny(strategy: str | LayoutSpec, *, evaluate: int = 0, checkpoint: Any = None, **run: Any) -> ResolvedRun:
    """A tiny run of six steps under a layout, which evaluates at this interval and after the last step."""
    resolved = tiny_run(LAYOUTS[strategy] if isinstance(strategy, str) else strategy, steps=STEPS, **run)
    training = resolved.run.training.model_copy(update={"evaluation": EvaluationSpec(batches=1, every=evaluate)})
    update = {"training": training, "checkpoint": CheckpointSpec(keep_last=9, **(checkpoint or {}))}
    return resolved.model_copy(update={"run": resolved.run.model_copy(update=update)})


def train(
    run: ResolvedRun, root: Path, callbacks: list[Callback], resume: Path | None = None, corpus: Any = None
) -> Session:
    """Train with these callbacks, on random tokens if there is no corpus. Collective."""
    return train_on(build_here(run), root, callbacks, resume, corpus)


def train_on(
    trainer: Trainer, root: Path, callbacks: list[Callback], resume: Path | None = None, corpus: Any = None
) -> Session:
    """The same, with a trainer that has just been built."""
    trainer.peak = 1e12, "not measured"  # measuring takes a second on every rank
    trainer.callbacks = named_callbacks(callbacks)
    if resume:
        restore(trainer, resume)
    first = trainer.worker.rank == 0
    root.mkdir(exist_ok=True, parents=True)
    display = Display(steps=STEPS, memory_bytes=1, device="cpu", enabled=first, stream=io.StringIO())
    with MetricsJournal(root / "metrics.jsonl") if first else nullcontext() as journal:
        stop, corpus = StopRequest(raises=True), corpus or tiny_corpus(held_out=True)
        session = Session(trainer, corpus, Outputs(root, display, journal), stop, callbacks)
        train_loop(session)
    return session
