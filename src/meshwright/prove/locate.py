"""Localization of the first difference: data, activations forward, losses, activation gradients, weight gradients, the
norm, updates, other state."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.prove.compare import StepComparison
from meshwright.prove.difference import Difference, measure
from meshwright.prove.reference import PHASES, Reference, load_weights, loader_for
from meshwright.prove.rounding import NUMBER, PartSums, judge, rounding_of_trace, worst_of
from meshwright.prove.tolerance import Tolerance
from meshwright.prove.trace import Tracer, recorded
from meshwright.trainer.setup import Trainer

BLOCK = re.compile(r"(input of )?layers\.\d+")


@dataclass(frozen=True)
class Location:
    """The first difference of a layout from the reference, in the order of computation."""

    phase: str
    """`start` (a weight before the first step), `data`, `forward`, `loss`, `backward`, `reduction` (a weight's
    gradient, though all activations' are right), `norm`, `update`, `state` (a buffer or moment after the step), `whole`
    (a whole step, or an evaluation) or `formats` (a number format, or a whole step in the recipe's precision)."""
    name: str
    """Module, parameter or buffer; for data, which ranks read which samples."""
    difference: Difference | None
    """None if no rank computed the tensor."""
    ranks: tuple[int, ...] = ()
    """All ranks on which it differs."""


@dataclass(frozen=True)
class _Share:
    """One rank's own losses."""

    rank: int
    data_rank: int
    tp_rank: int
    terms: list[tuple[float, int]]
    """(summed loss, number of terms) of each of its microbatches; empty on a rank without the head."""


class _Watch:
    """Compares one rank's activations with the reference's and keeps the worst position of each."""

    def __init__(self, trainer: Trainer, reference: Reference, tolerance: Tolerance) -> None:
        self.trainer, self.reference, self.tolerance = trainer, reference, tolerance
        self.index = reference.trace_index()
        layout, resolved = trainer.resolved.run.layout, trainer.resolved
        self.tp = layout.tp
        self.tp_rank = 0 if trainer.meshes is None else trainer.meshes.rank_along("tp")
        self.first_row = trainer.data_rank * (resolved.global_batch // layout.data_parallel)
        everything = torch.arange(resolved.run.data.sequence_length)
        self.places = everything if trainer.places is None else torch.from_numpy(trainer.places)
        self.differences: dict[tuple[str, str], Difference] = {}
        self.parts: dict[str, PartSums] = {}
        """Under low precision, used instead of `differences`; by `PHASE NAME`."""
        self.computed: set[tuple[str, str]] = set()

    def __call__(self, phase: str, name: str, microbatch: int, tensor: torch.Tensor) -> None:
        self.computed.add((phase, name))
        size = self.trainer.resolved.micro_batch
        start = self.first_row + microbatch * size
        places = self._places(tensor.shape[1])
        if name not in self.index[phase] or places is None or self._is_part(name.removeprefix("input of ")):
            return
        expected = self.reference.tensor("trace", phase, name)[start : start + size][:, places]
        pieces = {dim: expected.shape[dim] // tensor.shape[dim] for dim in range(2, expected.dim())}
        if phase == "backward" and any(1 < count < self.tp for count in pieces.values()):
            return  # a head on several ranks: each has only its own share of the gradient

        def here(whole: torch.Tensor) -> torch.Tensor:
            for dim, count in pieces.items():
                whole = whole.narrow(dim, self.tp_rank * count // self.tp * tensor.shape[dim], tensor.shape[dim])
            return whole

        expected = here(expected)
        if self.tolerance.statistical:
            square = here(self.reference.tensor("rounding of trace", phase, name)[start : start + size][:, places])
            part, key = PartSums.of(tensor, expected, square), f"{phase} {name}"
            self.parts[key] = self.parts[key] + part if key in self.parts else part
            return
        allowed = self.tolerance.relative * self.index[phase][name]
        difference = measure(tensor, expected, allowed, self.trainer.worker.rank)
        if (phase, name) not in self.differences or difference.by > self.differences[phase, name].by:
            row, place = divmod(int((tensor - expected).abs().flatten(2).amax(2).argmax()), tensor.shape[1])
            where = f"sample {start + row} of the step, position {int(places[place])}"
            self.differences[phase, name] = replace(difference, place=where)

    def _is_part(self, path: str) -> bool:
        """Whether a module is inside one of transformers' that ranks share, where their numbers are parts."""
        foreign = self.trainer.resolved.model.foreign
        return foreign is not None and foreign.split is not None and foreign.split.within(foreign.blocks, path)

    def _places(self, length: int) -> torch.Tensor | None:
        """The positions of an activation of this length; between blocks tensor-parallel ranks share them."""
        if length == len(self.places):
            return self.places
        return self.places.chunk(self.tp)[self.tp_rank] if length * self.tp == len(self.places) else None


def locate(trainer: Trainer, reference: Reference, comparison: StepComparison, tolerance: Tolerance) -> Location:
    """Recompute the gradients of a step that differs, and compare every activation and gradient. Collective.

    The reference must have been traced at this step.
    """
    if comparison.misread is not None:
        return Location("data", comparison.misread.what, None, comparison.misread.ranks)
    step = comparison.step
    load_weights(trainer, reference, step - 1)
    watch = _Watch(trainer, reference, tolerance)
    names = {name for phase in PHASES for name in watch.index[phase]}
    if trainer.resolved.run.training.compile:  # inside a compiled block modules' outputs are not observable
        whole = trainer.resolved.run.training.compile_scope == "model"
        names = {name for name in names if name.count(".") <= 1 and not whole}
    passes = trainer.train_step.passes
    with loader_for(trainer) as loader, Tracer(trainer.model, watch, names), recorded(passes) as losses:
        trainer.train_step.gradients(loader.microbatches(step - 1))
    trainer.store.zero_grad()
    share = _Share(trainer.worker.rank, trainer.data_rank, watch.tp_rank, losses.terms())
    shares = gather_everywhere(share)
    by_rank = gather_everywhere((watch.differences, watch.computed))
    rounded, relative = dict[str, list[Difference]](), tolerance.relative
    if tolerance.statistical:
        moved = rounding_of_trace(reference)
        rounded, relative = judge(gather_everywhere(watch.parts), moved), min(relative, NUMBER * moved["loss"])

    def first(phase: str) -> Location | None:
        """The first location of a phase. A block that no rank computed is reported at its output, without its
        modules."""
        for name in (name for name in watch.index[phase] if name in names):
            if BLOCK.fullmatch(name) and not any((phase, name) in computed for _, computed in by_rank):
                return Location(phase, name, None)
            same = [differences[phase, name] for differences, _ in by_rank if (phase, name) in differences]
            wrong = [difference for difference in (*same, *rounded.get(f"{phase} {name}", [])) if not difference.equal]
            if wrong:
                worst = worst_of(wrong) if tolerance.statistical else max(wrong, key=lambda difference: difference.by)
                return Location(phase, name, worst, tuple(sorted({difference.rank for difference in wrong})))
        return None

    def loss() -> Location | None:
        over_tokens = passes.objective.over == "tokens"
        wrong = _find_wrong_loss(shares, reference.losses(), over_tokens=over_tokens, relative=relative)
        return wrong or (None if comparison.loss.equal else Location("loss", "loss", comparison.loss))

    return first("forward") or loss() or first("backward") or _weights(comparison)


def _find_wrong_loss(
    shares: Sequence[_Share], reference: Sequence[tuple[float, int]], *, over_tokens: bool, relative: float
) -> Location | None:
    """The first microbatch whose loss differs from the reference's.

    Args:
        shares: of all ranks.
        reference: of all the step's microbatches, in the order of the data-parallel ranks that have them.
        over_tokens: whether each of the ranks that share rows has only the loss of its own tokens.
        relative: the allowed relative difference of a loss.
    """
    groups: dict[tuple[int, int], list[_Share]] = {}
    for share in shares:
        if share.terms:
            groups.setdefault((share.data_rank, share.tp_rank), []).append(share)
    for (data_rank, _), group in groups.items():
        for number in range(len(group[0].terms)):
            of_ranks = [share.terms[number] for share in group]
            parts = [of_ranks] if over_tokens else [[one] for one in of_ranks]
            expected, terms = reference[data_rank * len(group[0].terms) + number]
            for part in parts:
                ours, counted = sum(loss for loss, _ in part), sum(count for _, count in part)
                if not abs(ours - expected) <= relative * abs(expected) or counted != terms:
                    ranks = tuple(share.rank for share in group)
                    place = f"microbatch {number} of these ranks, which has {counted} loss terms"
                    place += f" instead of {terms}" if counted != terms else ""
                    difference = Difference(abs(ours - expected), relative * abs(expected), ranks[0], place=place)
                    return Location("loss", "loss", difference, ranks)
    return None


def locate_start(differences: dict[str, Difference]) -> Location | None:
    """The first weight or buffer that differs from the reference's before the first step."""
    for name, difference in differences.items():
        if not difference.equal:
            return Location("start", name, difference, (difference.rank,))
    return None


def _weights(comparison: StepComparison) -> Location:
    """The first weight gradient that differs; the backward pass goes through the table from its end."""
    for name in reversed(comparison.gradients):
        difference = comparison.gradients[name]
        if not difference.equal:
            return Location("reduction", name, difference, (difference.rank,))
    if comparison.gnorm is not None and not comparison.gnorm.equal:
        return Location("norm", "gradient norm", comparison.gnorm, (comparison.gnorm.rank,))
    for phase, differences in (("update", comparison.updates), ("state", comparison.state)):
        for name in reversed(differences):
            if not differences[name].equal:
                return Location(phase, name, differences[name], (differences[name].rank,))
    return Location("loss", "loss", comparison.loss)
