"""The effect of low-precision rounding on a step, measured on one process, as the allowance of a layout's differences.

In bf16 a bound on single numbers tolerates tens of percent. But a step has many numbers, and rounding is unbiased. So
one process recomputes the step `RUNS` times, with one more stochastic rounding of every input and output of every
layer, and of their gradients. This measures how far each tensor moves. A layout's tensors may move `SIZE` times as far,
root mean square, part by part; as a whole they may grow or shrink by `FACTOR` of the measured standard deviations.

Smaller faults are missed: a tenth of a tensor's rounding, or a few numbers of many.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.comm.objects import gather_everywhere
from meshwright.models.embedding import Embedding
from meshwright.models.linear import Linear
from meshwright.optim import shards
from meshwright.prove.difference import Difference
from meshwright.prove.gathered import as_gathered
from meshwright.prove.reference import (
    PHASES,
    Reference,
    build_alone,
    gradients_of,
    load_weights,
    loader_for,
    rows_of,
    trace_alone,
    trace_file,
)
from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.setup import Trainer

RUNS, SIZE, FACTOR, NUMBER = 4, 2.0, 8.0, 8.0
"""`NUMBER`: standard deviations by which loss and norm may differ."""


@contextmanager
def rounded_anew(model: nn.Module, epsilon: float, seed: int) -> Iterator[None]:
    """Inside the context, the inputs and outputs of `model`'s layers are stochastically rounded once more, up or down;
    `epsilon`: the distance from 1 to the next number."""
    generator = torch.Generator().manual_seed(seed)

    def again(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().double()
        return (wide * (1 + epsilon / 2 * (2 * torch.rand(wide.shape, generator=generator, dtype=wide.dtype) - 1))).to(
            tensor.dtype
        )

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
    """Save how far rounding moves every gradient and weight of each step, and the loss and the norm."""
    epsilon = resolved.run.training.dtypes.compute.epsilon
    measured = {step: _Measured(reference, step) for step in range(1, steps + 1)}
    for run in range(RUNS):
        trainer = build_alone(resolved)
        with loader_for(trainer) as loader, rounded_anew(trainer.model, epsilon, run):
            for step, of_step in measured.items():
                load_weights(trainer, reference, step - 1)
                with as_gathered(trainer, resolved.run.layout):
                    loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
                gnorm = trainer.train_step.gradient_norm()
                of_step.numbers.add("loss", loss - reference.facts(step)["loss"])
                of_step.numbers.add("gnorm", gnorm - reference.facts(step)["gnorm"])
                for name, gradient in gradients_of(trainer):
                    of_step.add("gradients", name, gradient)
                trainer.train_step.update(step, gnorm)
                trainer.store.zero_grad()
                for name, parameter in trainer.parameters.items():
                    of_step.add("weights", name, parameter)
    for step, of_step in measured.items():
        of_step.numbers.save(reference.folder / f"step-{step}")


class _Deviations:
    """Root mean squares of numbers over `RUNS` runs, by name."""

    def __init__(self) -> None:
        self.squares: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        """Take in a number of one run."""
        self.squares[name] = self.squares.get(name, 0.0) + value * value

    def save(self, folder: Path) -> None:
        """Write them to `rounding.json`."""
        rms = {name: sqrt(square / RUNS) for name, square in self.squares.items()}
        (folder / "rounding.json").write_text(json.dumps(rms))


class _Measured:
    """The effect of rounding on a step: on loss, norm and tensors as a whole in `numbers`, and on each number of a
    tensor, as a mean square, in the reference's folder."""

    def __init__(self, reference: Reference, step: int) -> None:
        self.reference, self.step, self.numbers = reference, step, _Deviations()

    def add(self, kind: str, name: str, ours: torch.Tensor) -> None:
        """Take in a tensor of one run."""
        expected = self.reference.tensor(f"step-{self.step}", kind, name)
        moved = ours.detach().double() - expected
        square = moved.square() / RUNS
        place = f"step-{self.step}", f"rounding of {kind}", name
        seen = f"{kind} {name}" in self.numbers.squares
        self.reference.save(square + self.reference.tensor(*place) if seen else square, *place)
        change = (expected - _origin(self.reference, self.step, kind, name)).double()
        factor = _ratio(float((moved * change).sum()), float(change.square().sum()))
        self.numbers.add(f"{kind} {name}", factor)


def _origin(reference: Reference, step: int, kind: str, name: str) -> torch.Tensor:
    """The origin of a factor: zero for a gradient, the value before the step for a weight."""
    if kind == "weights":
        return reference.weight(step - 1, name)
    return torch.zeros_like(reference.tensor(f"step-{step}", kind, name))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class _Moves:
    """Accumulates how far a traced step's activations and their gradients move from the trace."""

    def __init__(self, resolved: ResolvedRun, reference: Reference) -> None:
        self.resolved, self.reference, self.index = resolved, reference, reference.trace_index()
        self.squares: dict[tuple[str, str], np.memmap] = {}
        self.numbers = _Deviations()
        self._sums: dict[str, tuple[float, float]] = {}

    def __call__(self, phase: str, name: str, microbatch: int, tensor: torch.Tensor) -> None:
        if name not in self.index[phase] or len(tensor) != self.resolved.micro_batch:
            return
        rows = rows_of(self.resolved, microbatch)
        expected = self.reference.tensor("trace", phase, name)[rows].double()
        moved = tensor.detach().double() - expected
        if (phase, name) not in self.squares:
            place, like = ("rounding of trace", phase, name), expected.float().numpy()
            self.squares[phase, name] = trace_file(self.reference, self.resolved, like, *place)
        self.squares[phase, name][rows] += (moved.square() / RUNS).numpy()
        along, change = self._sums.get(f"{phase} {name}", (0.0, 0.0))
        sums = along + float((moved * expected).sum()), change + float(expected.square().sum())
        self._sums[f"{phase} {name}"] = sums

    def end_run(self) -> None:
        """Add the run's effect on each tensor as a whole."""
        for name, sums in self._sums.items():
            self.numbers.add(name, _ratio(*sums))
        self._sums.clear()


def trace_rounding(resolved: ResolvedRun, reference: Reference, step: int) -> None:
    """Save how far rounding moves every activation of a traced step, its gradient, and each microbatch's loss."""
    moves, losses = _Moves(resolved, reference), reference.losses()
    names = {name for phase in PHASES for name in moves.index[phase]}
    for run in range(RUNS):
        trainer = build_alone(resolved)
        with rounded_anew(trainer.model, resolved.run.training.dtypes.compute.epsilon, run):
            ours = trace_alone(trainer, resolved.run.layout, reference, step, moves, names)
        moves.end_run()
        for (loss, _), (expected, _) in zip(ours, losses, strict=True):
            moves.numbers.add("loss", _ratio(loss - expected, expected) / sqrt(len(losses)))
    for array in moves.squares.values():
        array.flush()
    moves.numbers.save(reference.folder / "trace")


def rounding_of_trace(reference: Reference) -> dict[str, float]:
    """How far rounding moves each microbatch's loss (`loss`) and, as a whole, `PHASE NAME`; standard deviations as
    shares."""
    return json.loads((reference.folder / "trace" / "rounding.json").read_text())


@dataclass(frozen=True)
class PartSums:
    """Sums over one rank's part of a tensor."""

    count: int
    moved: float
    """Sum of squares of the difference."""
    rounding: float
    """The same for the effect of rounding."""
    along: float
    """The dot product of the difference and the tensor minus its origin."""
    change: float
    """The squared norm of the tensor minus its origin."""
    stored: float
    """The same as `moved` if every stored weight differed in its last bit; 0 for gradients."""

    @staticmethod
    def of(
        ours: torch.Tensor, expected: torch.Tensor, square: torch.Tensor, base: torch.Tensor | None = None
    ) -> "PartSums":
        """The sums for a rank's part, from the reference and the mean square of rounding's effect; `base`: the origin
        of a factor (default zero; given for weights)."""
        moved = ours.detach().to(expected.device, torch.float64) - expected
        change = (expected if base is None else expected - base).double()
        last_bits = expected.double() * (0.0 if base is None else FP32.epsilon)
        sums = (moved.square(), square, moved * change, change.square(), last_bits.square())
        return PartSums(expected.numel(), *(float(terms.sum()) for terms in sums))

    def __add__(self, other: "PartSums") -> "PartSums":
        return PartSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def compare_rounded(
    trainer: Trainer,
    reference: Reference,
    step: int,
    kind: str,
    ours: dict[str, torch.Tensor],
    least: Mapping[str, float] | None = None,
) -> dict[str, Difference]:
    """The root-mean-square difference of every tensor from the reference, in its worst part. Collective.

    Args:
        kind: `gradients` or `weights`.
        ours: this rank's tensors, by the parameters' names.
        least: see `judge`.
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
        parts[name] = PartSums.of(tensor, expected, square, base)
    factors = {name.removeprefix(f"{kind} "): by for name, by in rounding_of(reference, step).items()}
    differences = judge(gather_everywhere(parts), factors, least=least)
    return {name: worst_of(of_ranks) for name, of_ranks in differences.items()}


def worst_of(differences: Sequence[Difference]) -> Difference:
    """The worst of one tensor's differences (`judge`): the whole as a factor, if that differs."""
    return max(differences, key=lambda difference: (difference.factor is not None, difference.share))


def rounding_of(reference: Reference, step: int) -> dict[str, float]:
    """How far rounding moves the loss, the norm and every tensor as a whole, in standard deviations."""
    return json.loads((reference.folder / f"step-{step}" / "rounding.json").read_text())


def judge(
    by_rank: Sequence[Mapping[str, PartSums]],
    factors: Mapping[str, float],
    *,
    size: float = SIZE,
    least: Mapping[str, float] | None = None,
) -> dict[str, list[Difference]]:
    """For every tensor, the root-mean-square differences of all ranks that hold a part of it, and last the difference
    of the whole as a factor.

    Args:
        by_rank: each rank's parts.
        factors: rounding's effect on a tensor as a whole, in standard deviations.
        size: allowance of a part, in root mean squares of rounding's effect.
        least: for every tensor, the minimum allowance of a part.

    A difference in the last bit of a stored weight is rounding even if none of the measured runs has it: all weights of
    a part may have one, and as a whole they move like that many independent numbers.
    """
    differences: dict[str, list[Difference]] = {}
    for name in {name: None for parts in by_rank for name in parts}:
        parts = {rank: parts[name] for rank, parts in enumerate(by_rank) if name in parts and parts[name].count}
        if not parts:
            continue
        count = sum(part.count for part in parts.values())
        typical = sum(part.rounding for part in parts.values()) / count
        room = {rank: size * sqrt(max(typical, part.rounding / part.count)) for rank, part in parts.items()}
        floor = least.get(name, 0.0) if least else 0.0
        differences[name] = [
            Difference(_root(part.moved / part.count), max(room[rank], floor, sqrt(part.stored / part.count)), rank)
            for rank, part in parts.items()
        ]
        along, change = sum(part.along for part in parts.values()), sum(part.change for part in parts.values())
        off, scale = abs(_ratio(along, change)), sqrt(change / count)
        last_bits = sqrt(sum(part.stored for part in parts.values())) / count
        allowed = max(FACTOR * max(factors[name] * scale, last_bits), floor)
        if not off * scale <= allowed:
            worst = max(differences[name], key=lambda difference: difference.share).rank
            differences[name].append(Difference(off * scale, allowed, worst, 1 + _ratio(along, change)))
    return differences


def _root(value: float) -> float:
    return sqrt(value) if value == value else inf
