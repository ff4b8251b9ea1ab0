"""Continuous verification (`guards.verify_every`): one process recomputes a step of the run in progress.

Every rank writes its state before the step and its results after it (`snapshot.py`). Rank 0 then starts a process on
its machine's CPUs, and training continues. (The process, `prove/replay.py`, is started by name, because it belongs to a
higher floor.) The verdict is announced to all ranks after the step during which it arrives. Ranks wait for it only
before the next verified step and at the end.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.comm.objects import from_first
from meshwright.families import finetuned_table
from meshwright.launch.memory import field_of
from meshwright.launch.status import VerificationError
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe
from meshwright.storage.durable import own_folder
from meshwright.trainer.folder import RESOLVED
from meshwright.trainer.plugins import Plugins, write_plugins
from meshwright.trainer.replicas import replica_fault
from meshwright.trainer.session import Session
from meshwright.trainer.setup import Trainer
from meshwright.trainer.snapshot import write_after, write_before

FOLDER, VERDICT, LOG = ".verify", "verdict.json", "log"
"""A folder in the run directory, and files in it."""

PROGRAM = "meshwright.prove.replay"

LOOK_EVERY = 0.2
"""Seconds between two checks for an awaited verdict."""


class VerifyGuard(Callback):
    """Verifies a step at the recipe's interval. Make it the last of a run's callbacks, because others may change
    weights."""

    def __init__(self, trainer: Trainer, plugins: Plugins) -> None:
        """Raises `UserError` if the run cannot be verified. Collective."""
        self.trainer, self.plugins = trainer, plugins
        self.every = trainer.resolved.run.guards.verify_every
        self.folder = Path(trainer.resolved.run.run_dir) / FOLDER
        self._step = 0  # the step whose state has been written, or 0
        self._owed = False  # whether a due step could not be verified; then the next one is due
        self._underway = 0  # the step being recomputed, or 0
        self._skipped = trainer.skipped
        self._process: subprocess.Popen[bytes] | None = None
        if problem := from_first(_too_large(trainer)):
            raise UserError(problem)

    def on_start(self, training: Training) -> None:
        if training.is_first_rank:
            own_folder(self.folder)
            (self.folder / LOG).unlink(missing_ok=True)
        self._prepare(_session(training))

    def on_step(self, training: Training, record: Record) -> None:
        session, written = _session(training), self._step == training.step
        self._step, left_out = 0, record["skipped"] > self._skipped
        self._skipped = record["skipped"]
        if written and not left_out:
            self._begin(record)
        self._owed |= written and left_out
        if self._underway:
            self._hear(session, from_first(self._verdict()))
        self._prepare(session)

    def on_stop(self, training: Training, record: Record) -> None:
        if record["kind"] == "end":
            self._wait(_session(training))
        elif self._process is not None:
            self._process.kill()
            self._process.wait()

    def _prepare(self, session: Session) -> None:
        """Write the state if the next step is to be verified."""
        step = session.step + 1
        if step <= session.run.training.steps and (self._owed or step % self.every == 0):
            self._wait(session)
            if self._underway:
                return  # a signal arrived
            self._step, self._owed = step, False
            if fault := replica_fault(self.trainer.parameters):
                text = f"its initial weights are wrong: {fault}"
                self._publish(session, step, {"equal": False, "text": text})
            write_before(self.folder / "step", self.trainer)

    def _begin(self, record: Record) -> None:
        step, folder = self.trainer.step, self.folder / "step"
        write_after(folder, self.trainer, {"loss": record["loss"], "gnorm": record["gnorm"]})
        self._underway = step
        if self.trainer.worker.rank == 0:
            (folder / RESOLVED).write_text(dump_recipe(self.trainer.resolved, expanded=True))
            words = ["--folder", str(folder), *write_plugins(self.plugins, folder), "--parent", str(os.getpid())]
            with (self.folder / LOG).open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", PROGRAM, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def _verdict(self) -> dict[str, Any] | None:
        """On the first rank, the verdict, or the reason why there is none; None if not yet known."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        verdict = self.folder / "step" / VERDICT
        if status == 0 and verdict.is_file():
            return json.loads(verdict.read_text())
        lines = [line.strip() for line in (self.folder / LOG).read_text(errors="replace").splitlines() if line.strip()]
        message = lines[-1] if lines else f"ended with status {status} and without a message"
        return {"equal": False, "text": f"it could not be recomputed: {message}"}

    def _wait(self, session: Session) -> None:
        """Wait for the pending verdict, if there is one, or for a signal. Collective."""
        waited = 0
        while self._underway:
            session.watchdog.enter("verification", waited)
            verdict, signalled = from_first((self._verdict(), session.signal))
            if signalled:
                return  # the loop stops the run at its next agreement
            self._hear(session, verdict)
            if self._underway:
                time.sleep(LOOK_EVERY)
            waited += 1

    def _hear(self, session: Session, verdict: dict[str, Any] | None) -> None:
        """Publish the verdict, if it has arrived."""
        if verdict is not None:
            step, self._underway, self._process = self._underway, 0, None
            self._publish(session, step, verdict)

    def _publish(self, session: Session, step: int, verdict: dict[str, Any]) -> None:
        """Raises `VerificationError` on all ranks if the step differs and the recipe demands it."""
        session.log("verification", **{"step": step, **verdict})
        if verdict["equal"]:
            session.say(f"verified step {step}: {verdict['text']}")
            return
        text = f"step {step} differs: {verdict['text']}"
        if session.run.guards.on_difference == "raise":
            raise VerificationError(f"{text} (guards.verify_every; the files are in {self.folder})")
        session.say(f"warning: {text}")


def describe(every: int) -> str:
    """A line for the banner."""
    return (
        f"every {every} steps, one step is recomputed in a separate process: it takes the operations of three steps "
        "on the CPUs of rank 0's machine, and the bytes of two checkpoints in run_dir"
    )


def _session(training: Training) -> Session:
    assert isinstance(training, Session)
    return training


def _too_large(trainer: Trainer) -> str | None:
    """Why the recomputation does not fit on this machine together with the run; None if it does, or if that is
    unknown."""
    free = 1024 * field_of(Path("/proc/meminfo"), "MemAvailable:")
    dtypes, needed = trainer.resolved.run.training.dtypes, 0
    for row in finetuned_table(trainer.resolved.model, trainer.resolved.run.finetune):
        state = dtypes.master.bytes + dtypes.gradient.bytes + 2 * dtypes.state.bytes if row.trained else 0
        needed += row.numel * (state + (dtypes.store.bytes if dtypes.mixed or not row.trained else 0))
    if not free or needed <= free:
        return None
    return (
        f"guards.verify_every: one process needs {needed / 2**30:.1f} GiB for weights, gradients and optimizer state, "
        f"and rank 0's machine has {free / 2**30:.1f} GiB of memory free; set it to 0"
    )
