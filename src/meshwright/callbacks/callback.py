"""The hooks of a run: `Callback`, which users subclass, and `Training`, the run in progress that each hook is given.

Hooks are called on every rank, in the same order, between two steps; so a hook may use collectives if every rank does.
A single rank may request to stop, to evaluate or to save: all ranks agree on it before the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.spec.run import Run

if TYPE_CHECKING:  # verbs that need no torch import what people are shown, and with it this file
    import torch
    from torch import nn

Record = dict[str, Any]
"""One line of `metrics.jsonl`: `kind`, `time` (seconds since the epoch), `step`, and the fields that docs/metrics.md
lists for the kind. Figures are equal on all ranks, except `time`, `mem` and figures derived from measured seconds."""


class NextBatch(Protocol):
    """The global batch of the step that comes next."""

    terms: Sequence[int]
    """Terms of the objective (trained tokens, pairs) in each of its microbatches, in the samples' order: the same on
    every rank. There are as many as data-parallel ranks times accumulation steps."""
    num_sequences: int
    """Sequences in all of them."""

    def gradient_norm(self, weights: Sequence[float]) -> float:
        """The 2-norm of the sum over microbatches of `weights[i]` times the gradient of the i-th's summed loss, without
        any balance loss of experts. Costs a step's forward and backward passes. Collective."""
        ...


class Training(Protocol):
    """A run in progress, as callbacks see it."""

    rank: int
    """This process's number among `world_size`."""
    world_size: int
    device: "torch.device"
    """Where this rank computes."""
    run_dir: Path
    """Folder that receives everything the run writes."""

    @property
    def run(self) -> Run:
        """The recipe as a value, overrides applied."""
        ...

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes `metrics.jsonl`."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def model(self) -> "nn.Module":
        """This rank's part of the model."""
        ...

    @property
    def parameters(self) -> "Mapping[str, torch.Tensor]":
        """The trained parameters by name, in full precision: plain tensors or DTensors, as sharded on this rank."""
        ...

    @property
    def optimizers(self) -> "Sequence[torch.optim.Optimizer]":
        """Every parameter that trains belongs to exactly one."""
        ...

    def stop(self, why: str) -> None:
        """Ask to end the run after this step, as if it were the last: all ranks evaluate, save and end.

        It is enough that one rank asks. `why` is printed and written with the last record.
        """
        ...

    def request_evaluation(self) -> None:
        """Ask to measure held-out loss after this step. It is enough that one rank asks."""
        ...

    def request_save(self) -> None:
        """Ask for a checkpoint of this step. It is enough that one rank asks."""
        ...

    def measure(self) -> Record | None:
        """Held-out loss of the weights as they are now: `loss`, `perplexity`, `tokens` and more, as in an evaluation's
        record. Nothing is written. Collective: every rank must call it.

        None if a signal cut it short. Raises `UserError` if the run has no held-out text.
        """
        ...

    def with_weights(self, tensors: "Mapping[str, torch.Tensor]") -> AbstractContextManager[None]:
        """In this `with`, the model computes with the values of `tensors`, which are named and sharded as
        `parameters`; both sides get their own back at its end. Collective."""
        ...

    def trial_steps(self) -> AbstractContextManager[Callable[[int, float], float | None]]:
        """In `with training.trial_steps() as step`, `step(i, lr)` makes the i-th optimizer step (the first is 0) from
        here off the record, with the learning rate `lr` (AdamW's; others keep their ratio to it). It returns the
        step's loss, NaN if it is not finite, and None if a signal came. Collective.

        At the end of the `with`, weights, optimizer and random state are restored. Raises `UserError` under an
        asynchronous pipeline.
        """
        ...

    def next_batch(self) -> NextBatch:
        """The batch of the step that comes next. Nothing of the run changes. Collective.

        Raises `UserError` under an asynchronous pipeline.
        """
        ...

    def log(self, kind: str, **fields: Any) -> Record:
        """Add a record to `metrics.jsonl` and the trackers (on the first rank); returns it."""
        ...

    def say(self, text: str) -> None:
        """Print lines of their own (on the first rank)."""
        ...


class Callback:
    """The base class of callbacks: override the hooks that you need."""

    patient = False
    """Whether its hooks may take hours, so that the watchdog waits."""

    @property
    def name(self) -> str:
        """Under which checkpoints keep the state; the class's name. Of two the second becomes `NAME-2`."""
        return type(self).__name__

    def on_start(self, training: Training) -> None:
        """Before the first step of this process; weights, step and this callback's own state are in place."""

    def on_step(self, training: Training, record: Record) -> None:
        """After every optimizer step, except one that the run goes back from (`rewind`)."""

    def on_evaluate(self, training: Training, record: Record) -> None:
        """After every evaluation on held-out text."""

    def on_save(self, training: Training, record: Record) -> None:
        """After a checkpoint has been published: `record["path"]`, of step `record["step"]`."""

    def on_stop(self, training: Training, record: Record) -> None:
        """After the last checkpoint of a run that has ended (kind `end`) or that a signal stopped (`stopped`)."""

    def on_record(self, training: Training, record: Record) -> None:
        """On the first rank only: every record that was written to `metrics.jsonl`, of any kind."""

    def abandon(self) -> None:
        """Called on this rank when an error ends the run: release what the callback holds in the process. Other ranks
        may be gone, so use no collectives."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a stop, as a JSON value, the same on every rank: `trainer.json` in the checkpoint keeps the
        first rank's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value of `state_dict`, on every rank, before `on_start`."""

    def tensors(self, parameters: "Mapping[str, torch.Tensor]") -> "Mapping[str, torch.Tensor]":
        """The tensors that must survive a stop: plain (equal on every rank) or DTensors, always of the same names and
        shapes. Checkpoints keep them sharded, so that any layout reads them.

        `parameters` are `Training.parameters`. A run that continues calls this first and then fills the tensors in
        place, so make them here where they do not exist yet.
        """
        return {}


def named_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks under the names that checkpoints keep them by, in order."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name, number = callback.name, 2
        while name in named:
            name, number = f"{callback.name}-{number}", number + 1
        named[name] = callback
    return named
