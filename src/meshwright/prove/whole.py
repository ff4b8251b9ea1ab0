"""Whole steps, as training makes them, compared with their definition on one process.

The comparison of single steps (`prove/compare.py`) reloads the weights after every step and calls the parts of a step
one by one. So it cannot see what a step leaves behind for the next one, nor how the parts are joined. Here both sides
run one fixed program: the layout by the functions that training calls, the reference by their definition (`Defined`).

1. An evaluation; with preferences, the reference model's margins.
2. Two steps, without reloading.
3. A step whose loss is finite and whose gradient overflows. It must be skipped, and change nothing.
4. The next step, with the weights as before. It must be as if the skipped step had not been.

An asynchronous pipeline's gradients are a step late by definition (`DefinedLate`). It makes four steps, then an
evaluation while batches are in flight, then `finish`.

After a step without reloading, weights differ by rounding, which moves the next gradients. The reference measures how
far: it computes them once more with weights moved by the allowed difference, in random directions. They may differ
`SWAY` times as far.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from re import compile as pattern
from typing import Protocol

import torch

from meshwright.data.loader import BatchShare, HostBatch, evaluation_batches
from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.optim.loss_scale import LossScaler
from meshwright.prove.gathered import as_gathered
from meshwright.prove.reference import facts_of, gradients_of, loader_for, samples_for
from meshwright.prove.tolerance import Facts
from meshwright.spec.layout import LayoutSpec
from meshwright.trainer.evaluate import evaluate
from meshwright.trainer.reference import margins_of
from meshwright.trainer.replicas import checksum
from meshwright.trainer.setup import Trainer
from meshwright.trainer.snapshot import moments

LATE_STEPS = 4
"""Steps of an asynchronous pipeline: the first has no update; two updates separate the weights of the last two."""

SKIPPED = "skipped step"
"""The event whose gradient overflows."""

FINAL_NORM = pattern(r"(.*\.)?(norm|norm_f|ln_f|final_layer_?norm)\.weight")
"""The norm before the head: its scale passes to the logits, and back to every gradient before it."""

HUGE = {torch.float64: 2.0**600, torch.float32: 2.0**100, torch.bfloat16: 2.0**100, torch.float16: 2.0**14}
"""Factors of the final norm: logits and losses stay finite, squares of gradients do not. Powers of two, so that the
weight can be restored exactly."""


@dataclass(frozen=True)
class Event:
    """One part of the program, and its figures, which are the same on every rank."""

    name: str
    numbers: dict[str, float]
    updates: int = 0
    """Updates since the weights were last equal on both sides, this one included."""
    step: int = 0
    """The step after which weights, buffers and moments are compared; 0: they are not."""
    changed: tuple[str, ...] = ()
    """Tensors of this rank that a skipped step changed."""


class Stepper(Protocol):
    """Makes whole steps."""

    late: bool
    """Whether an update uses the gradient of the batch before."""

    def __call__(self, step: int, microbatches: Sequence[HostBatch]) -> dict[str, float]:
        """The figures of optimizer step `step`."""
        ...

    def finish(self, step: int) -> None:
        """Make the pending update of late steps."""
        ...

    def weights(self) -> AbstractContextManager[None]:
        """Inside, the model computes with the weights that the layout's ranks would gather."""
        ...


class Trained:
    """Whole steps by the trainer's own `TrainStep`."""

    def __init__(self, trainer: Trainer) -> None:
        self.step, self.late = trainer.train_step, trainer.train_step.passes.late
        self.scale = None if self.step.scaler is None else self.step.scaler.scale
        """The loss scale at the start."""

    def __call__(self, step: int, microbatches: Sequence[HostBatch]) -> dict[str, float]:
        """The figures of the trainer's step."""
        result, scaler = self.step(step, microbatches), self.step.scaler
        figures = _figures(result.loss, result.gnorm or 0.0, result.trained, result.tokens, result.skipped)
        return figures | _scale(scaler, self.scale) | _load(None if result.skipped else result.expert_load)

    def finish(self, step: int) -> None:
        """Make the trainer's pending update."""
        self.step.finish(step)

    def weights(self) -> AbstractContextManager[None]:
        """See `Stepper`: as they are."""
        return nullcontext()


class Defined:
    """The definition of a step, on one process: the gradient of the mean loss, and an update if both the loss and the
    gradient's norm are finite. Nothing else is left of a step that is skipped, or of an evaluation."""

    late = False

    def __init__(self, trainer: Trainer, layout: LayoutSpec) -> None:
        self.trainer, self.layout = trainer, layout
        self.facts: Facts | None = None
        """Of the last update."""
        self.scaler = trainer.train_step.scaler or LossScaler()
        """What a recipe in fp16 would scale its loss by."""
        self.scale = self.scaler.scale

    def __call__(self, step: int, microbatches: Sequence[HostBatch]) -> dict[str, float]:
        """The figures of the step by its definition."""
        loss, trained = self.gradients(microbatches)
        gnorm, balance = self.trainer.train_step.gradient_norm(), self.trainer.train_step.balance
        finite = isfinite(loss) and isfinite(gnorm)
        if finite:
            self.update(step, loss, gnorm)
        self.trainer.store.zero_grad()
        for router in balance.routers:
            router.take_load()
        self.scaler.update(finite=finite)
        figures = _figures(loss, gnorm, trained, self.trainer.train_step.tokens, not finite)
        return figures | _scale(self.scaler, self.scale) | _load(balance.load if finite else None)

    def gradients(self, microbatches: Sequence[HostBatch]) -> tuple[float, int]:
        """Loss and number of terms; the gradient is left in the store."""
        self.trainer.model.train()
        with self.weights():
            return self.trainer.train_step.gradients(microbatches)

    def update(self, step: int, loss: float, gnorm: float) -> None:
        """Update with the gradient in the store."""
        self.facts = facts_of(self.trainer, loss, gnorm)
        self.trainer.train_step.update(step, gnorm, self.trainer.train_step.lr_factor(step))

    def finish(self, step: int) -> None:
        """Nothing is pending."""

    def weights(self) -> AbstractContextManager[None]:
        """Inside, the weights are rounded as the layout's ranks would gather them."""
        return as_gathered(self.trainer, self.layout)


class DefinedLate(Defined):
    """The definition of PipeDream-2BW's step: loss and gradient at the newest weights; the update with the gradient of
    the batch before, computed at the weights before."""

    late = True

    def __init__(self, trainer: Trainer, layout: LayoutSpec) -> None:
        super().__init__(trainer, layout)
        self.pending: dict[str, torch.Tensor] = {}

    def __call__(self, step: int, microbatches: Sequence[HostBatch]) -> dict[str, float]:
        loss, trained = self.gradients(microbatches)
        newest = {name: gradient.clone() for name, gradient in gradients_of(self.trainer)}
        gnorm = self._late_update(step)
        self.pending = newest
        return _figures(loss, gnorm, trained, self.trainer.train_step.tokens, skipped=False)

    def finish(self, step: int) -> None:
        """Make the update with the last batch's gradient."""
        self._late_update(step)

    def _late_update(self, step: int) -> float:
        gnorm = 0.0
        if self.pending:
            for name, parameter in self.trainer.parameters.items():
                parameter.grad = self.pending[name]
            gnorm = self.trainer.train_step.gradient_norm()
            self.update(step, 0.0, gnorm)
        self.trainer.store.zero_grad()
        return gnorm


def _figures(loss: float, gnorm: float, trained: int, tokens: int, skipped: bool) -> dict[str, float]:
    return {"loss": loss, "norm": gnorm, "terms": trained, "tokens": tokens, "skipped": float(skipped)}


def _scale(scaler: LossScaler | None, start: float | None) -> dict[str, float]:
    """The loss scale after a step, as a share of that at the start; nothing without one."""
    return {} if scaler is None or start is None else {"loss scale": scaler.scale / start}


def _load(load: float | None) -> dict[str, float]:
    """The load of an update; nothing without experts."""
    return {} if load is None else {"load of experts": load}


def program(trainer: Trainer, stepper: Stepper, done: int) -> Iterator[Event]:
    """The events of a proof after `done` compared steps. Collective."""
    if stepper.late:
        yield from _late_steps(trainer, stepper)
        return
    yield _evaluation(trainer, stepper)
    if trainer.train_step.passes.objective.needs_reference:
        yield _margins(trainer, stepper)
    first, second, skipped, last = range(done + 1, done + 5)
    with loader_for(trainer) as loader:
        yield Event(f"step {first}", stepper(first, loader.microbatches(first - 1)), updates=1)
        yield Event(f"step {second}", stepper(second, loader.microbatches(second - 1)), updates=2, step=second)
        yield _skipped(trainer, stepper, skipped, loader.microbatches(skipped - 1))
        yield Event(f"step {last}", stepper(last, loader.microbatches(last - 1)), updates=3, step=last)


def _late_steps(trainer: Trainer, stepper: Stepper) -> Iterator[Event]:
    with loader_for(trainer) as loader:
        for step in range(1, LATE_STEPS + 1):
            yield Event(f"step {step}", stepper(step, loader.microbatches(step - 1)), updates=step - 1)
        yield _evaluation(trainer, stepper, updates=LATE_STEPS - 1)
        stepper.finish(LATE_STEPS)
    yield Event("last update", {}, updates=LATE_STEPS, step=LATE_STEPS)


def _evaluation(trainer: Trainer, stepper: Stepper, updates: int = 0) -> Event:
    """The loss of samples that ranks and microbatches do not divide evenly."""
    resolved, step = trainer.resolved, trainer.train_step
    share = BatchShare.of_run(resolved, trainer.data_rank, trainer.places)
    count, samples = resolved.global_batch + 1, samples_for(trainer, seed=1)
    batches = evaluation_batches(samples, share, micro_batch=resolved.micro_batch, num_samples=count)
    with stepper.weights():
        result = evaluate(step.passes, batches, trainer.device, repeats_loss=step.repeats_loss)
    return Event("evaluation", {"loss": result.loss, "terms": result.tokens, **result.metrics}, updates=updates)


def _margins(trainer: Trainer, stepper: Stepper) -> Event:
    """The margins that a run computes before its first step, for as many samples."""
    samples = samples_for(trainer, seed=2, count=trainer.resolved.global_batch + 1)
    with stepper.weights():
        margins = margins_of(trainer, samples, samples.pair_numbers())
    return Event("margins", {f"pair {number}": float(margin) for number, margin in enumerate(margins)})


def _skipped(trainer: Trainer, stepper: Stepper, step: int, microbatches: Sequence[HostBatch]) -> Event:
    """A step whose gradient overflows, for models with a final norm. Its loss is huge but finite."""
    before = _sums(trainer)
    with _enlarged(trainer):
        numbers = stepper(step, microbatches)
    after = _sums(trainer)
    changed = tuple(name for name in after if after[name] != before.get(name)) if numbers["skipped"] else ()
    changed += tuple(
        name for name, errors in trainer.train_step.feedback.tensors(trainer.worker.rank).items() if errors.any()
    )
    return Event(SKIPPED, numbers, updates=2, changed=changed)


@contextmanager
def _enlarged(trainer: Trainer) -> Iterator[None]:
    """Inside, the weight of the final norm is enlarged by a power of two."""
    named = dict(trainer.model.named_parameters()) | trainer.parameters
    weights = [shards.local(weight) for name, weight in named.items() if FINAL_NORM.fullmatch(name)]
    factors = [HUGE[weight.dtype] for weight in weights]
    with torch.no_grad():
        for weight, factor in zip(weights, factors, strict=True):
            weight *= factor
    trainer.store.refresh()
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, factor in zip(weights, factors, strict=True):
                weight /= factor
        trainer.store.refresh()


def _sums(trainer: Trainer) -> dict[str, int]:
    """A hash of every weight, buffer and moment of this rank."""
    tensors = dict(trainer.parameters)
    tensors |= named_state(trainer.model) | {name: moment for name, moment, _ in moments(trainer)}
    return {name: checksum(tensor) for name, tensor in tensors.items()}
