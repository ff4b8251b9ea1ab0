"""A run's checkpoints: begun when due, announced when finished."""

import time

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.checkpoint.writer import CheckpointWriter, SaveOutcome
from meshwright.launch.status import UnsavedError
from meshwright.trainer.folder import run_files
from meshwright.trainer.session import Session
from meshwright.trainer.state import state_tensors, state_values

LAST_ATTEMPTS, LAST_PAUSE = 30, 10.0
"""Number of retries of the last checkpoint, and the seconds between them: enough to free disk space."""
AT_THE_NEXT = "training continues and retries at the next checkpoint"


class Saver:
    """The checkpoints of one run. Every rank makes the same calls; disk errors never stop training."""

    def __init__(self, session: Session) -> None:
        self.session, self.trainer, self.root = session, session.trainer, session.run_dir / "checkpoints"
        spec = session.run.checkpoint
        if self.trainer.store.writes_at_once:
            spec = spec.model_copy(update={"asynchronous": False})
        self.writer = CheckpointWriter(self.root, spec, run_files(session.run_dir))
        self.failed = 0
        """Checkpoints that were due and could not be written."""
        self._begun = self.writer.since = self.trainer.step  # the checkpoint that the run resumed from exists already

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self.writer.busy

    def save(self) -> None:
        """Start the checkpoint of the trainer's step; skip it if the previous one is still being written."""
        if not self.writer.idle:
            self._fail("the previous one is still being written")
            return
        self._begin()
        if not self.writer.spec.asynchronous:
            self._report(self.writer.finish())

    def settle(self) -> None:
        """Complete the next stage of the save in progress; call it when no rank is `busy`. Collective."""
        self._report(self.writer.settle())

    def wait(self) -> None:
        """Wait for the save in progress, if there is one. Collective."""
        self._report(self.writer.finish())

    def went_back(self, reason: str) -> None:
        """Record that the trainer has returned to an older step, which has a checkpoint."""
        self._begun = self.writer.since = self.trainer.step
        self.session.say(reason)
        self.session.log("rewind", why=reason)

    def finish(self, *, patient: bool = True) -> None:
        """Wait until the trainer's step is saved. Collective.

        Retries for five minutes, if `patient`. Raises `UnsavedError` if all attempts fail.
        """
        self.wait()
        attempts = LAST_ATTEMPTS if patient else 1
        while self._begun != self.trainer.step:
            self._begin()
            attempts -= 1
            again = f"retrying every {LAST_PAUSE:g} s, {attempts} more times" if attempts else "giving up"
            self._report(self.writer.finish(), again)
            if self._begun == self.trainer.step:
                return
            if not attempts:
                saved = list_checkpoints(self.root)
                rest = f"the newest intact one is {saved[-1].name}" if saved else "there is no other"
                raise UnsavedError(f"the checkpoint of step {self.trainer.step} could not be written; {rest}")
            time.sleep(LAST_PAUSE)

    def _begin(self) -> None:
        trainer = self.trainer
        self._begun = trainer.step
        trainer.train_step.finish(trainer.step)
        step, loss = self.session.held_out_loss or (None, None)
        values = state_values(trainer, held_out_loss=loss if step == trainer.step else None)
        self.writer.begin(trainer.step, state_tensors(trainer), values)

    def _report(self, outcome: SaveOutcome | None, again: str = AT_THE_NEXT) -> None:
        if outcome is None:
            return
        if outcome.path is None:
            self._begun = -1
            self._fail(outcome.problem or "", outcome.step, again)
            return
        self.session.say(
            f"saved {outcome.path} ({outcome.bytes / 1e6:.1f} MB in {outcome.total_seconds:.2f} s; "
            f"training waited {outcome.blocked_seconds:.2f} s)"
        )
        if outcome.problem:
            self.session.say(f"warning: {outcome.problem}")
        record = self.session.log(
            "checkpoint",
            step=outcome.step,
            path=str(outcome.path),
            bytes=outcome.bytes,
            blocked_seconds=outcome.blocked_seconds,
            total_seconds=outcome.total_seconds,
        )
        self.session.notify("on_save", record)

    def _fail(self, problem: str, step: int | None = None, again: str = AT_THE_NEXT) -> None:
        self.failed += 1
        step = self.trainer.step if step is None else step
        self.session.say(f"warning: step {step} is not saved: {problem}; {again} ({self.failed} missed so far)")
        self.session.log("checkpoint_missed", step=step, problem=problem, missed=self.failed)
