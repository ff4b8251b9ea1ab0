"""A run in progress: the object that callbacks receive (`callbacks.Training`), and their requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.comm.objects import gather_everywhere, largest
from meshwright.data.loader import Loader
from meshwright.data.prepare import Corpus
from meshwright.launch.launcher import watch_store
from meshwright.launch.signals import StopRequest
from meshwright.launch.watchdog import Watchdog
from meshwright.spec.errors import UserError
from meshwright.trainer.display import Display
from meshwright.trainer.evaluate import Evaluation, evaluate_held_out, evaluation_fields, evaluation_line
from meshwright.trainer.metrics import MetricsJournal, new_record
from meshwright.trainer.probes import ComingBatch, other_weights, trial_steps
from meshwright.trainer.setup import Trainer


@dataclass(frozen=True)
class Outputs:
    """Where a run writes."""

    run_dir: Path
    display: Display
    journal: MetricsJournal | None
    """None on all ranks but the first."""


class Session(Training):
    """One rank's run in progress. Every rank makes the same calls."""

    def __init__(
        self, trainer: Trainer, corpus: Corpus, outputs: Outputs, stop: StopRequest, callbacks: Sequence[Callback] = ()
    ) -> None:
        worker = trainer.worker
        self.trainer, self.corpus = trainer, corpus
        self.run, self.model, self.device = trainer.resolved.run, trainer.model, trainer.device
        self.parameters, self.optimizers = trainer.parameters, trainer.optimizers.optimizers
        self.rank, self.world_size, self.is_first_rank = worker.rank, worker.world_size, worker.rank == 0
        self.run_dir, self.display, self.journal = outputs.run_dir, outputs.display, outputs.journal
        self.callbacks = [self.display, *callbacks]
        self.watchdog = Watchdog(self.run.guards, worker.rank, worker.world_size, watch_store(worker))
        self.loader: Loader
        """The loader of training samples; set when the loop starts."""
        self.reason = ""
        """The reason why a callback ended the run; the same on every rank."""
        self.held_out_loss: tuple[int, float] | None = None
        """Step and result of the last evaluation."""
        self.evaluation_asked = self.save_asked = False
        """Whether any rank's callback requested it at this step; the same on every rank."""
        self._signals, self._reasons = stop, list[str]()
        self._evaluation = self._save = False  # requested on this rank since the last agreement

    @property
    def signal(self) -> int:
        """The signal that this rank has received, or 0."""
        return self._signals.number

    @property
    def step(self) -> int:
        return self.trainer.step

    def stop(self, reason: str) -> None:
        self._reasons.append(reason)

    def request_evaluation(self) -> None:
        self._evaluation = True

    def request_save(self) -> None:
        self._save = True

    def say(self, text: str) -> None:
        self.display.say(text)

    def log(self, kind: str, **fields: Any) -> Record:
        record = new_record(kind, **{"step": self.step, **fields})
        if self.journal is not None:
            self.journal.write(record)
            for callback in self._hooked("on_record"):
                callback.on_record(self, record)
        return record

    def measure(self) -> Record | None:
        evaluation = self._measure()
        return None if evaluation is None else evaluation_fields(evaluation)

    def with_weights(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        return other_weights(self.trainer, tensors)

    @contextmanager
    def trial_steps(self) -> Iterator[Callable[[int, float], float | None]]:
        with trial_steps(self.trainer, self.loader) as step:

            def heed_signals(index: int, lr: float) -> float | None:
                (signal,) = largest(self._signals.number)
                self.watchdog.enter("trial step", index)
                return None if signal else step(index, lr)

            yield heed_signals

    def next_batch(self) -> ComingBatch:
        return ComingBatch(self.trainer, self.loader)

    def _measure(self) -> Evaluation | None:
        if not self.corpus.held_out:
            raise UserError("a callback needs the held-out loss, but no text is held out; set data.held_out")
        return evaluate_held_out(self.trainer, self.corpus, self._signals)

    def agree(self, *, writing: bool) -> tuple[int, bool]:
        """Share between all ranks the signal that any received (or 0), whether any is writing a checkpoint, and the
        requests of callbacks on any rank. Collective."""
        requests = (bool(self._reasons), self._evaluation, self._save)
        signal, is_writing, stop, evaluation, save = largest(self._signals.number, writing, *requests)
        if stop:
            reasons = [reason for of_rank in gather_everywhere(self._reasons) for reason in of_rank]
            self.reason = "; ".join(dict.fromkeys(filter(None, [self.reason, *reasons])))
        self.evaluation_asked |= bool(evaluation)
        self.save_asked |= bool(save)
        self._reasons, self._evaluation, self._save = [], False, False
        return signal, bool(is_writing)

    def begin_step(self) -> None:
        """Clear the previous step's requests, which have been served."""
        self.evaluation_asked = self.save_asked = False
        self.trainer.step += 1
        self.watchdog.enter("step", self.step)

    def evaluate(self) -> None:
        """Measure held-out loss, record it and call the callbacks. Collective."""
        self.watchdog.enter("evaluation")
        evaluation = self._measure()
        if evaluation is not None:
            self.held_out_loss = self.step, evaluation.loss
            self.say(evaluation_line(evaluation, self.step))
            self.notify("on_evaluate", self.log("evaluation", **evaluation_fields(evaluation)))
        self.evaluation_asked = self._evaluation = False

    def notify(self, hook: str, *record: Record) -> None:
        """Call a hook of every callback, in order."""
        for callback in self._hooked(hook):
            self.watchdog.enter(f"{callback.name}.{hook}", patient=callback.patient)
            getattr(callback, hook)(self, *record)

    def _hooked(self, hook: str) -> list[Callback]:
        return [each for each in self.callbacks if getattr(type(each), hook) is not getattr(Callback, hook)]
