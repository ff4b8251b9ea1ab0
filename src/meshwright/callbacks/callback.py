"""The hooks of a run: `Callback`, which users subclass, and `Training`, the run in progress that each hook is given.

Hooks are called on every rank, in the same order, between two steps, so a hook may use collectives if every rank does.
Any rank may request to stop, to evaluate or to save; all ranks follow before the next step.
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
    """The global batch of the next step."""

    terms: Sequence[int]
    """Terms of the objective (trained tokens, pairs) in each of its microbatches, in the order of samples, equal on
    every rank. The number of microbatches is data-parallel ranks times accumulation steps."""
    num_sequences: int
    """Sequences in all microbatches together."""

    def gradient_norm(self, weights: Sequence[float]) -> float:
        """The 2-norm of the sum over microbatches of `weights[i]` times the gradient of the i-th's summed loss, without
        any balance loss of experts. Costs a step's forward and backward passes. Collective."""
        ...


class Training(Protocol):
    """A run in progress, as callbacks see it."""

    rank: int
    """This process's rank, 0 to `world_size` - 1."""
    world_size: int
    device: "torch.device"
    """The device of this rank."""
    run_dir: Path
    """Folder that receives everything the run writes."""

    run: Run
    """The recipe as a value, overrides applied."""
    is_first_rank: bool
    """Whether this is rank 0, the only one that prints and writes `metrics.jsonl`."""
    model: "nn.Module"
    """This rank's part of the model."""
    parameters: "Mapping[str, torch.Tensor]"
    """The trained parameters by name, in full precision: plain tensors or DTensors, as sharded on this rank."""
    optimizers: "Sequence[torch.optim.Optimizer]"
    """The optimizers; every trained parameter belongs to exactly one."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    def stop(self, reason: str) -> None:
        """Request the end of the run after this step, as if it were the last: all ranks evaluate, save and end.

        One rank's request suffices. `reason` is printed and written with the last record.
        """
        ...

    def request_evaluation(self) -> None:
        """Request an evaluation after this step. One rank's request suffices."""
        ...

    def request_save(self) -> None:
        """Request a checkpoint of this step. One rank's request suffices."""
        ...

    def measure(self) -> Record | None:
        """The held-out loss of the current weights: `loss`, `perplexity`, `tokens` and more, as in an evaluation's
        record. Nothing is written. Collective: every rank must call it.

        None if a signal cut it short. Raises `UserError` if the run has no held-out text.
        """
        ...

    def with_weights(self, tensors: "Mapping[str, torch.Tensor]") -> AbstractContextManager[None]:
        """Within this `with`, the model computes with the values of `tensors`, which are named and sharded like
        `parameters`. At its end, model and `tensors` have their own values again. Collective."""
        ...

    def trial_steps(self) -> AbstractContextManager[Callable[[int, float], float | None]]:
        """Within `with training.trial_steps() as step`, `step(i, lr)` makes the i-th optimizer step from here (counted
        from 0), unrecorded, with the learning rate `lr` (AdamW's; others keep their ratio to it). It returns the step's
        loss, NaN if it is not finite, and None if a signal arrived. Collective.

        At the end of the `with`, weights, optimizer and random state are restored. Raises `UserError` under an
        asynchronous pipeline.
        """
        ...

    def next_batch(self) -> NextBatch:
        """The batch of the next step. The run does not change. Collective.

        Raises `UserError` under an asynchronous pipeline.
        """
        ...

    def log(self, kind: str, **fields: Any) -> Record:
        """Add a record to `metrics.jsonl` and the trackers (on the first rank); returns it."""
        ...

    def say(self, text: str) -> None:
        """Print separate lines (on the first rank)."""
        ...


class Callback:
    """The base class of callbacks: override the hooks that you need."""

    patient = False
    """Whether its hooks may take hours, so that the watchdog waits."""

    @property
    def name(self) -> str:
        """The name under which checkpoints keep the state: the class's name. A second callback of the same name becomes
        `NAME-2`."""
        return type(self).__name__

    def on_start(self, training: Training) -> None:
        """Before the first step of this process; weights, step and this callback's state are restored."""

    def on_step(self, training: Training, record: Record) -> None:
        """After every optimizer step, except one that leads to a `rewind`."""

    def on_evaluate(self, training: Training, record: Record) -> None:
        """After every evaluation on held-out text."""

    def on_save(self, training: Training, record: Record) -> None:
        """After a checkpoint has been published: `record["path"]`, of step `record["step"]`."""

    def on_stop(self, training: Training, record: Record) -> None:
        """After the last checkpoint of a run that has ended (kind `end`) or that a signal stopped (`stopped`)."""

    def on_record(self, training: Training, record: Record) -> None:
        """On the first rank only: every record that was written to `metrics.jsonl`, of any kind."""

    def abandon(self) -> None:
        """Called on this rank when an error ends the run: release the callback's resources. Other ranks may have
        exited, so use no collectives."""

    def state_dict(self) -> dict[str, Any]:
        """State that checkpoints keep, as a JSON value that is equal on every rank: the first rank's is saved in
        `trainer.json`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value of `state_dict`, on every rank, before `on_start`."""

    def tensors(self, parameters: "Mapping[str, torch.Tensor]") -> "Mapping[str, torch.Tensor]":
        """Tensors that checkpoints keep: plain (equal on every rank) or DTensors, always with the same names and
        shapes. They are saved sharded, so that any layout can read them.

        `parameters` are `Training.parameters`. A resumed run calls this first and then fills the tensors in place, so
        create them here if they do not exist yet.
        """
        return {}


def named_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by their names in checkpoints, in order."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name, number = callback.name, 2
        while name in named:
            name, number = f"{callback.name}-{number}", number + 1
        named[name] = callback
    return named
