"""Probes: experiments of callbacks on a run in progress (other weights, trial steps, parts of a gradient). The run's
state is restored afterwards."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from meshwright.callbacks.callback import NextBatch
from meshwright.comm import collectives
from meshwright.data.loader import HostBatch, Loader
from meshwright.models.batch import to_device
from meshwright.optim.shards import local
from meshwright.spec.errors import UserError
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import own_tensors, random_state, restore_random_state


@contextmanager
def other_weights(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """In this context parameters and the `tensors` of the same names and sharding have exchanged their values."""
    _exchange(trainer, tensors)
    try:
        yield
    finally:
        _exchange(trainer, tensors)


@torch.no_grad()
def _exchange(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        ours, theirs = local(trainer.parameters[name]), local(tensor)
        kept = ours.clone()
        ours.copy_(theirs)
        theirs.copy_(kept)
    trainer.store.refresh()


@contextmanager
def trial_steps(trainer: Trainer, loader: Loader) -> Iterator[Callable[[int, float], float]]:
    """In this context `step(i, lr)` makes the i-th optimizer step from here with learning rate `lr` and returns its
    loss. If loss or gradient are not finite it returns NaN and leaves the weights unchanged.

    Afterwards weights, optimizer state, loss scale and random state are restored from a copy.
    """
    _refuse_late(trainer, "trial steps")
    train_step, first = trainer.train_step, trainer.step + trainer.passed_over
    kept = {name: local(tensor).clone() for name, tensor in own_tensors(trainer).items()}
    scale = train_step.scaler.state() if train_step.scaler else None
    load = train_step.balance.load

    def step(index: int, lr: float) -> float:
        loss, _ = train_step.gradients(loader.microbatches(first + index))
        gnorm = train_step.gradient_norm()
        finite = math.isfinite(loss) and math.isfinite(gnorm)
        if finite:
            train_step.update(trainer.step + 1 + index, gnorm, lr / trainer.resolved.run.training.optimizer.lr)
        else:
            train_step.feedback.drop()
        train_step.store.zero_grad()
        if train_step.scaler is not None:
            train_step.scaler.update(finite=finite)
            return loss  # an excessive loss scale says nothing about the weights
        return loss if finite else math.nan

    try:
        yield step
    finally:
        with torch.no_grad():
            for name, tensor in own_tensors(trainer).items():
                local(tensor).copy_(kept[name])
        trainer.store.refresh()
        restore_random_state(trainer, kept)
        train_step.balance.load = load
        if train_step.scaler is not None and scale is not None:
            train_step.scaler.load(scale)


class ComingBatch(NextBatch):
    """The batch of the next step."""

    def __init__(self, trainer: Trainer, loader: Loader) -> None:
        """Collective."""
        _refuse_late(trainer, "gradient norms of parts of a batch")
        self.trainer = trainer
        self.microbatches: Sequence[HostBatch] = loader.microbatches(trainer.step + trainer.passed_over)
        passes, place = trainer.train_step.passes, trainer.data_rank * len(self.microbatches)
        self._here = slice(place, place + len(self.microbatches))
        terms = torch.zeros(trainer.resolved.run.layout.data_parallel * len(self.microbatches), dtype=torch.int64)
        if not trainer.train_step.repeats_loss:
            terms[self._here] = torch.tensor([passes.count(microbatch) for microbatch in self.microbatches])
        self.terms = tuple(collectives.all_reduce_(terms.to(trainer.device)).tolist())
        self.num_sequences = trainer.resolved.global_batch

    def gradient_norm(self, weights: Sequence[float]) -> float:
        trainer, train_step = self.trainer, self.trainer.train_step
        random = random_state(trainer)
        scale = train_step.scaler.scale if train_step.scaler else 1.0
        train_step.balance.begin(0.0)
        batches = [to_device(microbatch, trainer.device) for microbatch in self.microbatches]
        train_step.feedback.begin(scale)
        with train_step.feedback.untouched():
            train_step.passes.train(batches, [scale * weight for weight in weights[self._here]])
        norm = train_step.gradient_norm()
        train_step.store.zero_grad()
        restore_random_state(trainer, random)
        return norm


def _refuse_late(trainer: Trainer, what: str) -> None:
    if trainer.train_step.passes.late:
        raise UserError(
            f"layout.schedule: an asynchronous pipeline does not support {what}: its gradients are one step late"
        )
