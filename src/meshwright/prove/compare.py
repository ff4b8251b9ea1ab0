"""Comparison of a layout's steps with the reference: data, loss, gradients, norm, updates, and all other state."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.prove.difference import Difference, measure
from meshwright.prove.gathered import Room, room_of, rounding_told
from meshwright.prove.readings import Misread, check_readings
from meshwright.prove.reference import Facts, Reference, load_weights, loader_for
from meshwright.prove.rounding import NUMBER, compare_rounded, rounding_of
from meshwright.prove.tolerance import Tolerance
from meshwright.spec.precision import FP32
from meshwright.trainer.setup import Trainer
from meshwright.trainer.snapshot import moments


@dataclass
class StepComparison:
    """The comparison of one step, the same on every rank. After a difference in gradients the comparison stops: without
    equal gradients, ranks may not even agree on the next message."""

    step: int
    loss: Difference
    reference: Facts
    """The reference's figures."""
    gnorm: Difference | None = None
    """None: not compared."""
    gradients: dict[str, Difference] = field(default_factory=dict)
    updates: dict[str, Difference] = field(default_factory=dict)
    """The difference of every parameter after the step."""
    state: dict[str, Difference] = field(default_factory=dict)
    """Differences of buffers and optimizer state after the step, and of the experts' load."""
    rounded: float | None = None
    """Relative distance by which quantized reductions moved the gradient; None without them."""
    misread: Misread | None = None
    """Set if ranks did not read the step's samples."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        tensors = [*self.gradients.values(), *self.updates.values(), *self.state.values()]
        numbers = [self.loss, *filter(None, [self.gnorm])]
        return self.misread is None and all(difference.equal for difference in (*numbers, *tensors))


def compare_start(trainer: Trainer, reference: Reference) -> dict[str, Difference]:
    """Every parameter and buffer before the first step, which must be equal bit for bit. Collective."""
    rank, found = trainer.worker.rank, {}
    for name, parameter in trainer.parameters.items():
        found[name] = measure(
            shards.local(parameter), shards.part_like(reference.weight(0, name), parameter), 0.0, rank
        )
    for name, buffer in named_state(trainer.model).items():
        found[name] = measure(shards.local(buffer), shards.part_like(reference.state(0, name), buffer), 0.0, rank)
    return worst_over_ranks(found)


def compare_steps(trainer: Trainer, reference: Reference, steps: int, tolerance: Tolerance) -> list[StepComparison]:
    """Train up to `steps` steps and compare each; the last one compared is the first that differs. Collective.

    Every step starts from the reference's weights, so that one step's rounding is not counted in the next.
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


def _compare_step(
    trainer: Trainer, microbatches: list, step: int, reference: Reference, tolerance: Tolerance
) -> StepComparison:
    facts = reference.facts(step)
    misread = check_readings(trainer, microbatches, step)
    with rounding_told(trainer.model) as told:
        loss, _ = trainer.train_step.gradients(microbatches)
    room = room_of(told, trainer.resolved.run.layout, tied=trainer.resolved.model.tied_embeddings)
    comparison = StepComparison(
        step=step,
        loss=_number(trainer, "loss", loss, step, reference, tolerance),
        reference=facts,
        gradients=_gradients(trainer, step, reference, tolerance, room),
        misread=misread,
        rounded=_rounded(trainer, step, reference) if room.most else None,
    )
    if comparison.equal:
        gnorm = trainer.train_step.gradient_norm()
        comparison.gnorm = _number(trainer, "gnorm", gnorm, step, reference, tolerance, room.norm)
        trainer.train_step.update(step, gnorm)
        comparison.updates = _updates(trainer, step, reference, tolerance, room)
        comparison.state = _state(trainer, step, reference, tolerance, room)
    trainer.store.zero_grad()
    return comparison


def _rounded(trainer: Trainer, step: int, reference: Reference) -> float:
    """Relative distance by which quantization moved the gradient: the norm of the difference over its own.
    Collective."""
    moved = length = 0.0
    for name, parameter in trainer.parameters.items():
        expected = shards.part_like(reference.gradient(step, name), parameter).double()
        ours = shards.local(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        moved, length = moved + float((ours - expected).square().sum()), length + float(expected.square().sum())
    sums = gather_everywhere((moved, length))
    whole = sum(one for _, one in sums)
    return math.sqrt(sum(one for one, _ in sums) / whole) if whole else 0.0


def _gradients(
    trainer: Trainer, step: int, reference: Reference, tolerance: Tolerance, room: Room
) -> dict[str, Difference]:
    here, allowed = {}, tolerance.relative * reference.facts(step)["largest"]
    for name, parameter in trainer.parameters.items():
        here[name] = shards.local(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    if tolerance.statistical:
        gradients = compare_rounded(trainer, reference, step, "gradients", here, room.most)
    else:
        gradients = {}
        for name, gradient in here.items():
            expected = shards.part_like(reference.gradient(step, name), trainer.parameters[name])
            gradients[name] = measure(gradient, expected, allowed + room.of(name), trainer.worker.rank)
        gradients = worst_over_ranks(gradients)
    for row in trainer.table:
        if row.trained:  # but no rank holds it
            gradients.setdefault(row.name, Difference(math.inf, allowed))
    return gradients


def _updates(
    trainer: Trainer, step: int, reference: Reference, tolerance: Tolerance, room: Room
) -> dict[str, Difference]:
    updates, facts = {}, reference.facts(step)
    if tolerance.statistical:
        here = {name: shards.local(parameter) for name, parameter in trainer.parameters.items()}
        slope = max(tolerance.slope, tolerance.muon_slope) * facts["factor"]
        least = {name: slope * room.after_clipping(name, facts) for name in here}
        return compare_rounded(trainer, reference, step, "weights", here, least)
    for name, parameter in trainer.parameters.items():
        expected = shards.part_like(reference.weight(step, name), parameter)
        allowed = tolerance.of_update(facts, _largest(expected), room.after_clipping(name, facts))
        updates[name] = measure(shards.local(parameter), expected, allowed, trainer.worker.rank)
    return worst_over_ranks(updates)


def _state(
    trainer: Trainer, step: int, reference: Reference, tolerance: Tolerance, room: Room
) -> dict[str, Difference]:
    state, facts, rank = {}, reference.facts(step), trainer.worker.rank
    for name, buffer in named_state(trainer.model).items():
        expected = shards.part_like(reference.state(step, name), buffer)
        state[name] = measure(shards.local(buffer), expected, tolerance.rounding * _largest(expected), rank)
    for name, moment, parameter in moments(trainer):
        expected = reference.moment(step, name)
        expected = shards.part_like(expected, parameter) if expected.dim() else expected
        of, _, key = name.rpartition(".")
        allowed = tolerance.of_moment(key, facts, step, _largest(expected), room.after_clipping(of, facts))
        state[name] = measure(moment, expected, allowed, rank)
    load = trainer.train_step.balance.load
    if load is not None:
        expected_load = facts["expert_load"] or 0.0
        state["load of experts"] = Difference(abs(load - expected_load), 1e-9 * expected_load, rank)
    return worst_over_ranks(state)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _number(
    trainer: Trainer,
    name: Literal["loss", "gnorm"],
    ours: float,
    step: int,
    reference: Reference,
    tolerance: Tolerance,
    more: float = 0.0,
) -> Difference:
    """The worst difference over all ranks; the number should be the same on each."""
    expected = reference.facts(step)[name]
    number = torch.tensor([ours, expected], dtype=torch.float64)
    allowed = tolerance.relative * abs(expected)
    if tolerance.statistical:
        allowed = min(allowed, NUMBER * rounding_of(reference, step)[name] + 4 * FP32.epsilon * abs(expected))
    found = measure(number[:1], number[1:], allowed + more, trainer.worker.rank)
    return worst_over_ranks({"": found})[""]


def worst_over_ranks(differences: dict[str, Difference]) -> dict[str, Difference]:
    """For every tensor that some rank holds, the difference that is largest relative to its allowance. Collective."""
    worst: dict[str, Difference] = {}
    for of_rank in gather_everywhere(differences):
        for name, difference in of_rank.items():
            if name not in worst or difference.share > worst[name].share:
                worst[name] = difference
    return worst
