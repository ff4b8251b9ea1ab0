"""The one place that compares a layout's steps with the reference: loss, norm, every gradient and every update."""

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.optim import shards
from meshwright.prove.reference import Reference, loader_for
from meshwright.prove.tolerance import Tolerance
from meshwright.trainer.setup import Trainer

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Difference:
    """How far a number or tensor is from the reference, at most."""

    by: float
    allowed: float
    rank: int = 0
    factor: float | None = None
    """Where the whole difference is a factor: ours = factor x reference."""
    place: str = ""
    """Where the largest difference is, where that says something."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains it."""
        return self.by <= self.allowed

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.by / self.allowed if self.allowed else (torch.inf if self.by else 0.0)


@dataclass
class StepComparison:
    """One step, the same on every rank."""

    step: int
    loss: Difference
    gnorm: Difference
    reference: dict[str, float]
    """The reference's figures."""
    gradients: dict[str, Difference] = field(default_factory=dict)
    updates: dict[str, Difference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether rounding explains everything."""
        tensors = [*self.gradients.values(), *self.updates.values()]
        return self.loss.equal and self.gnorm.equal and all(difference.equal for difference in tensors)


def measure(ours: torch.Tensor, reference: torch.Tensor, allowed: float, rank: int) -> Difference:
    """The largest absolute difference; NaN counts as infinite."""
    if not ours.numel():
        return Difference(0.0, allowed, rank)
    ours = ours.detach().to(reference.dtype)
    by = (ours - reference).abs().max().nan_to_num(torch.inf).item()
    factor = None
    if by > allowed:
        square = (reference * reference).sum()
        ratio = ((ours * reference).sum() / square).item() if square else 0.0
        rest = (ours - ratio * reference).abs().max().item()
        if abs(ratio - 1) > 1e-6 and rest <= max(1e-6 * by, 2 * allowed):
            factor = ratio
    return Difference(by, allowed, rank, factor)


def compare_steps(trainer: Trainer, reference: Reference, steps: int, tolerance: Tolerance) -> list[StepComparison]:
    """Train up to `steps` steps and compare each; the last one compared is the first that differs. Collective.

    Every step starts from the reference's weights, so that what rounding did to one step is not counted in the next.
    """
    comparisons = []
    with loader_for(trainer) as loader:
        for step in range(1, steps + 1):
            comparison = _compare_step(trainer, loader.microbatches(step - 1), step, reference, tolerance)
            comparisons.append(comparison)
            if not comparison.equal:
                break
            load_weights(trainer, reference, step)
    return comparisons


def load_weights(trainer: Trainer, reference: Reference, step: int) -> None:
    """Give this rank's part of the model the reference's weights after `step`."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            shards.local(parameter).copy_(shards.part_like(reference.weight(step, name), parameter))
    if trainer.masters is not None:
        trainer.masters.refresh()


def _compare_step(
    trainer: Trainer, microbatches: list, step: int, reference: Reference, tolerance: Tolerance
) -> StepComparison:
    rank, facts = trainer.worker.rank, reference.facts(step)
    allowed = tolerance.relative * facts["largest"]
    loss, _ = trainer.train_step.gradients(microbatches)
    gradients = {}
    for name, parameter in trainer.parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected = shards.part_like(reference.gradient(step, name), parameter)
        gradients[name] = measure(shards.local(gradient), expected, allowed, rank)
    gnorm = trainer.train_step.gradient_norm()
    trainer.train_step.update(step, gnorm)
    trainer.optimizers.zero_grad()
    updates = {}
    for name, parameter in trainer.parameters.items():
        expected = shards.part_like(reference.weight(step, name), parameter)
        weight = expected.abs().max().item() if expected.numel() else 0.0
        room = tolerance.of_update(allowed, weight, facts["smallest_norm"])
        updates[name] = measure(shards.local(parameter), expected, room, rank)
    gradients, updates = worst_over_ranks(gradients), worst_over_ranks(updates)
    for row in trainer.table:
        if row.trained:  # and no rank holds it
            gradients.setdefault(row.name, Difference(math.inf, allowed))
    return StepComparison(
        step=step,
        loss=_number(loss, facts["loss"], tolerance),
        gnorm=_number(gnorm, facts["gnorm"], tolerance),
        reference=facts,
        gradients=gradients,
        updates=updates,
    )


def _number(ours: float, reference: float, tolerance: Tolerance) -> Difference:
    number = torch.tensor([ours, reference], dtype=torch.float64)
    return measure(number[:1], number[1:], tolerance.relative * abs(reference), 0)


def worst_over_ranks(differences: dict[str, Difference]) -> dict[str, Difference]:
    """Of every tensor that some rank holds, the difference that is worst for what is allowed. Collective."""
    worst: dict[str, Difference] = {}
    for of_rank in gather(differences):
        for name, difference in of_rank.items():
            if name not in worst or difference.share > worst[name].share:
                worst[name] = difference
    return worst


def gather(value: ValueT) -> list[ValueT]:
    """Every rank's value. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
