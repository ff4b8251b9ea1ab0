"""The one place that finds the first tensor that differs: activations forward, then their gradients, then weights'."""

import re
from dataclasses import dataclass

import torch

from meshwright.prove.compare import Difference, StepComparison, gather, load_weights, measure
from meshwright.prove.reference import PHASES, Reference, loader_for
from meshwright.prove.tolerance import Tolerance
from meshwright.prove.trace import Tracer
from meshwright.trainer.setup import Trainer

BLOCK = re.compile(r"(input of )?layers\.\d+")


@dataclass(frozen=True)
class Location:
    """Where a layout first leaves the reference, in the order of computation."""

    phase: str
    """`forward`, `loss`, `backward`, `reduction` (a weight's gradient, though all activations' are right) or
    `update`."""
    name: str
    """Module or parameter."""
    difference: Difference | None
    """None where no rank computed it."""
    ranks: tuple[int, ...] = ()
    """All ranks on which it differs."""


class _Watch:
    """Compares one rank's activations with the reference's, keeping the worst place of each."""

    def __init__(self, trainer: Trainer, reference: Reference, tolerance: Tolerance) -> None:
        self.trainer, self.reference, self.tolerance = trainer, reference, tolerance
        self.index = reference.trace_index()
        layout, resolved = trainer.resolved.run.layout, trainer.resolved
        self.tp = layout.tp
        self.tp_rank = 0 if trainer.meshes is None else trainer.meshes.rank_along("tp")
        self.first_row = trainer.data_rank * (resolved.global_batch // layout.data_parallel)
        everything = torch.arange(resolved.run.data.sequence_length)
        self.places = everything if trainer.places is None else torch.from_numpy(trainer.places)
        self.found: dict[tuple[str, str], Difference] = {}
        self.computed: set[tuple[str, str]] = set()

    def __call__(self, phase: str, name: str, microbatch: int, tensor: torch.Tensor) -> None:
        self.computed.add((phase, name))
        size = self.trainer.resolved.micro_batch
        start = self.first_row + microbatch * size
        places = self._places(tensor.shape[1])
        if name not in self.index[phase] or places is None:
            return
        whole = self.reference.tensor("trace", phase, name)[start : start + size]
        expected = whole[:, places]
        for dim in range(2, expected.dim()):
            pieces = expected.shape[dim] // tensor.shape[dim]
            if phase == "backward" and 1 < pieces < self.tp:
                return  # a head that several ranks have: each knows only its own share of the gradient
            piece = self.tp_rank * pieces // self.tp
            expected = expected.narrow(dim, piece * tensor.shape[dim], tensor.shape[dim])
        allowed = self.tolerance.relative * self.index[phase][name]
        difference = measure(tensor, expected, allowed, self.trainer.worker.rank)
        if (phase, name) not in self.found or difference.by > self.found[phase, name].by:
            row, place = divmod(int((tensor - expected).abs().flatten(2).amax(2).argmax()), tensor.shape[1])
            where = f"sample {start + row} of the step, position {int(places[place])}"
            self.found[phase, name] = Difference(
                difference.by, difference.allowed, difference.rank, difference.factor, where
            )

    def _places(self, length: int) -> torch.Tensor | None:
        """Which positions an activation of this length is of; between blocks tensor-parallel ranks share them."""
        if length == len(self.places):
            return self.places
        return self.places.chunk(self.tp)[self.tp_rank] if length * self.tp == len(self.places) else None


def locate(trainer: Trainer, reference: Reference, comparison: StepComparison, tolerance: Tolerance) -> Location:
    """Repeat the gradients of a step that differs, and compare everything on the way. Collective.

    The reference must have been traced at this step.
    """
    step = comparison.step
    load_weights(trainer, reference, step - 1)
    watch = _Watch(trainer, reference, tolerance)
    names = {name for phase in PHASES for name in watch.index[phase]}
    if trainer.resolved.run.training.compile:  # what happens inside a compiled block is not the modules' anymore
        names = {name for name in names if name.count(".") <= 1}
    with loader_for(trainer) as loader, Tracer(trainer.model, watch, names):
        trainer.train_step.gradients(loader.microbatches(step - 1))
    trainer.optimizers.zero_grad()
    by_rank = gather((watch.found, watch.computed))

    def first(phase: str) -> Location | None:
        """A block that no rank computed shows where its end would be; its modules are not asked for one by one."""
        for name in (name for name in watch.index[phase] if name in names):
            if BLOCK.fullmatch(name) and not any((phase, name) in computed for _, computed in by_rank):
                return Location(phase, name, None)
            found = [differences[phase, name] for differences, _ in by_rank if (phase, name) in differences]
            wrong = [difference for difference in found if not difference.equal]
            if wrong:
                worst = max(wrong, key=lambda difference: difference.by)
                return Location(phase, name, worst, tuple(difference.rank for difference in wrong))
        return None

    return first("forward") or _loss(comparison) or first("backward") or _weights(comparison)


def _loss(comparison: StepComparison) -> Location | None:
    return None if comparison.loss.equal else Location("loss", "loss", comparison.loss)


def _weights(comparison: StepComparison) -> Location:
    """The backward pass goes through the table from its end."""
    for phase, differences in (("reduction", comparison.gradients), ("update", comparison.updates)):
        for name in reversed(differences):
            if not differences[name].equal:
                return Location(phase, name, differences[name], (differences[name].rank,))
    return Location("reduction", "gradient norm", comparison.gnorm)
