"""What rounding to few bits does to a step, measured on one process, and whether a layout's differences look like it.

In bf16 a bound on single numbers tolerates tens of percent. But a step has many numbers, and rounding is unbiased. So
the step is computed `RUNS` times more on one process, with every input and output of every layer, and their gradients,
rounded anew at random; that says by how much each tensor moves. A layout's tensors may move `SIZE` times as much, root
mean square, part by part; as a whole they may grow or shrink by `FACTOR` standard deviations of what they do there.

It cannot see what is smaller than that: a fault of a tenth of a tensor's rounding, or of few numbers of many.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import nn

from meshwright.comm.objects import gather_everywhere
from meshwright.models.embedding import Embedding
from meshwright.models.linear import Linear
from meshwright.optim import shards
from meshwright.prove.difference import Difference
from meshwright.prove.reference import Reference, build_alone, load_weights, loader_for
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.setup import Trainer

RUNS, SIZE, FACTOR, NUMBER = 4, 2.0, 8.0, 8.0
"""`NUMBER`: standard deviations by which loss and norm may differ."""


@contextmanager
def rounded_anew(model: nn.Module, epsilon: float, seed: int) -> Iterator[None]:
    """Meanwhile what goes through the layers of `model` is rounded once more, up or down at random; `epsilon`: the
    distance from 1 to the next number."""
    generator = torch.Generator().manual_seed(seed)

    def again(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().double()
        return (wide * (1 + epsilon / 2 * (2 * torch.rand(wide.shape, generator=generator) - 1))).to(tensor.dtype)

    def perturbed(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        moved = tensor + (again(tensor) - tensor.detach())
        if moved.requires_grad:
            moved.register_hook(again)
        return moved

    hooks = []
    for module in model.modules():
        if isinstance(module, Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, inputs: tuple(map(perturbed, inputs))))
        if isinstance(module, Linear | Embedding) or type(module).__name__.endswith("Norm"):
            hooks.append(module.register_forward_hook(lambda _, inputs, output: perturbed(output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_rounding(resolved: ResolvedRun, reference: Reference, steps: int) -> None:
    """Keep by how much rounding moves every gradient and weight of each step, and the loss and the norm."""
    epsilon = resolved.run.training.dtypes.compute.epsilon
    numbers: dict[int, dict[str, float]] = {step: {} for step in range(1, steps + 1)}
    for run in range(RUNS):
        trainer = build_alone(resolved)
        with loader_for(trainer) as loader, rounded_anew(trainer.model, epsilon, run):
            for step in numbers:
                load_weights(trainer, reference, step - 1)
                loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
                gnorm = trainer.train_step.gradient_norm()
                facts, found = reference.facts(step), numbers[step]
                _add(found, "loss", loss - facts["loss"])
                _add(found, "gnorm", gnorm - facts["gnorm"])
                for name, parameter in trainer.parameters.items():
                    _keep(reference, step, "gradients", name, parameter.grad, found, first=run == 0)
                trainer.train_step.update(step, gnorm)
                trainer.store.zero_grad()
                for name, parameter in trainer.parameters.items():
                    _keep(reference, step, "weights", name, parameter, found, first=run == 0)
    for step, found in numbers.items():
        rms = {name: sqrt(square / RUNS) for name, square in found.items()}
        (reference.folder / f"step-{step}" / "rounding.json").write_text(json.dumps(rms))


def _add(found: dict[str, float], name: str, value: float) -> None:
    found[name] = found.get(name, 0.0) + value * value


def _keep(
    reference: Reference,
    step: int,
    kind: str,
    name: str,
    ours: torch.Tensor | None,
    found: dict[str, float],
    *,
    first: bool,
) -> None:
    """Add the mean square of each number's difference to what is kept, and that of the tensor's factor to `found`."""
    expected = reference.tensor(f"step-{step}", kind, name)
    base = _origin(reference, step, kind, name)
    moved = (torch.zeros_like(expected) if ours is None else ours.detach()).double() - expected
    square = moved.square() / RUNS
    place = f"step-{step}", f"rounding of {kind}", name
    reference.save(square if first else square + reference.tensor(*place), *place)
    change = (expected - base).double()
    _add(found, f"{kind} {name}", _ratio(float((moved * change).sum()), float(change.square().sum())))


def _origin(reference: Reference, step: int, kind: str, name: str) -> torch.Tensor:
    """What a factor counts from: a gradient is one from nothing, a weight from where the step found it."""
    if kind == "weights":
        return reference.weight(step - 1, name)
    return torch.zeros_like(reference.tensor(f"step-{step}", kind, name))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class _Part:
    """Sums over one rank's part of a tensor."""

    count: int
    moved: float
    """Sum of squares of what differs."""
    rounding: float
    """The same as rounding makes it."""
    along: float
    """The product of what differs with what it is a factor of."""
    change: float
    """The square of the latter."""


def compare_rounded(
    trainer: Trainer, reference: Reference, step: int, kind: str, ours: dict[str, torch.Tensor]
) -> dict[str, Difference]:
    """Of every tensor how far it is from the reference, root mean square, in the part that is worst. Collective.

    Args:
        kind: `gradients` or `weights`.
        ours: what this rank holds, by the parameters' names.
    """
    parts = {}
    for name, tensor in ours.items():
        parameter = trainer.parameters[name]
        expected, square, base = (
            shards.part_like(whole, parameter)
            for whole in (
                reference.tensor(f"step-{step}", kind, name),
                reference.tensor(f"step-{step}", f"rounding of {kind}", name),
                _origin(reference, step, kind, name),
            )
        )
        moved, change = tensor.detach().double() - expected, (expected - base).double()
        sums = (moved.square(), square, moved * change, change.square())
        parts[name] = _Part(expected.numel(), *(float(terms.sum()) for terms in sums))
    return _judge(gather_everywhere(parts), kind, rounding_of(reference, step))


def rounding_of(reference: Reference, step: int) -> dict[str, float]:
    """By how much rounding moves the loss, the norm and every tensor as a whole, standard deviations."""
    return json.loads((reference.folder / f"step-{step}" / "rounding.json").read_text())


def _judge(by_rank: list[dict[str, _Part]], kind: str, factors: dict[str, float]) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    for name in {name: None for parts in by_rank for name in parts}:
        parts = {rank: parts[name] for rank, parts in enumerate(by_rank) if name in parts and parts[name].count}
        typical = _ratio(sum(part.rounding for part in parts.values()), sum(part.count for part in parts.values()))
        for rank, part in parts.items():
            allowed = SIZE * sqrt(max(typical, part.rounding / part.count))
            size = Difference(_root(part.moved / part.count), allowed, rank)
            if name not in found or size.share > found[name].share:
                found[name] = size
        along, change = sum(part.along for part in parts.values()), sum(part.change for part in parts.values())
        off = abs(_ratio(along, change))
        room = FACTOR * factors[f"{kind} {name}"]
        if not off <= room and name in found:
            scale = sqrt(change / sum(part.count for part in parts.values()))
            found[name] = Difference(off * scale, room * scale, found[name].rank, 1 + _ratio(along, change))
    return found


def _root(value: float) -> float:
    return sqrt(value) if value == value else inf
