"""Comparison of a layout's steps with the reference: data, loss, gradients, norm, updates, and all other state."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.data.loader import HostBatch, Loader, padding_of
from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.prove.difference import Difference, largest_entry, measure
from meshwright.prove.gathered import QuantizationRoom, recorded_rounding, room_of
from meshwright.prove.reference import Reference, gradients_of, load_weights, loader_for, samples_for
from meshwright.prove.rounding import NUMBER, compare_rounded, rounding_of
from meshwright.prove.tolerance import Facts, Tolerance
from meshwright.spec.precision import FP32
from meshwright.trainer.setup import Trainer
from meshwright.trainer.snapshot import moments


@dataclass(frozen=True)
class SamplesRead:
    """The samples that one rank read in a step."""

    rows: tuple[int | None, ...]
    """The sample of the step in each row; None for a row that is not a sample."""
    places: tuple[int, ...]
    """The positions in each sample whose tokens the rank has."""
    other: str = ""
    """The difference from the sample other than the tokens."""


@dataclass(frozen=True)
class Misread:
    """Samples that some ranks wrongly read or failed to read."""

    what: str
    ranks: tuple[int, ...]


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
    rank, differences = trainer.worker.rank, {}
    for name, parameter in trainer.parameters.items():
        differences[name] = measure(
            shards.local(parameter), shards.part_like(reference.weight(0, name), parameter), 0.0, rank
        )
    for name, buffer in named_state(trainer.model).items():
        differences[name] = measure(shards.local(buffer), shards.part_like(reference.state(0, name), buffer), 0.0, rank)
    return worst_over_ranks(differences)


def compare_steps(trainer: Trainer, reference: Reference, steps: int, tolerance: Tolerance) -> list[StepComparison]:
    """Train up to `steps` steps and compare each; the last one compared is the first that differs. Collective.

    Every step starts from the reference's weights, so that one step's rounding is not counted in the next.
    """
    comparisons = []
    with loader_for(trainer) as loader:
        for step in range(1, steps + 1):
            comparison = _Step(trainer, reference, tolerance, step).compare(loader.microbatches(step - 1))
            comparisons.append(comparison)
            if not comparison.equal:
                break
            load_weights(trainer, reference, step)
    return comparisons


class _Step:
    """One step of a layout and the reference's; every comparison is collective."""

    def __init__(self, trainer: Trainer, reference: Reference, tolerance: Tolerance, step: int) -> None:
        self.trainer, self.reference, self.tolerance, self.step = trainer, reference, tolerance, step
        self.facts, self.rank = reference.facts(step), trainer.worker.rank
        self.room = QuantizationRoom()
        """The possible effect of quantization, known after the backward pass."""

    def compare(self, microbatches: list[HostBatch]) -> StepComparison:
        """Make the step, and compare each of its results."""
        trainer, resolved = self.trainer, self.trainer.resolved
        misread = check_readings(trainer, microbatches, self.step)
        with recorded_rounding(trainer.model) as rounding:
            loss, _ = trainer.train_step.gradients(microbatches)
        self.room = room_of(rounding, resolved.run.layout, tied=resolved.model.tied_embeddings)
        comparison = StepComparison(
            step=self.step,
            loss=self._number("loss", loss),
            reference=self.facts,
            gradients=self._gradients(),
            misread=misread,
            rounded=self._rounded() if self.room.most else None,
        )
        if comparison.equal:
            gnorm = trainer.train_step.gradient_norm()
            comparison.gnorm = self._number("gnorm", gnorm, self.room.norm)
            trainer.train_step.update(self.step, gnorm)
            comparison.updates = self._updates()
            comparison.state = self._state()
        trainer.store.zero_grad()
        return comparison

    def _number(self, name: Literal["loss", "gnorm"], ours: float, more: float = 0.0) -> Difference:
        """The worst difference over all ranks; the number should be the same on each."""
        expected = self.facts[name]
        number = torch.tensor([ours, expected], dtype=torch.float64)
        allowed = self.tolerance.relative * abs(expected)
        if self.tolerance.statistical:
            moved = rounding_of(self.reference, self.step)[name]
            allowed = min(allowed, NUMBER * moved + 4 * FP32.epsilon * abs(expected))
        difference = measure(number[:1], number[1:], allowed + more, self.rank)
        return worst_over_ranks({"": difference})[""]

    def _rounded(self) -> float:
        """Relative distance by which quantization moved the gradient: the norm of the difference over its own."""
        moved = length = 0.0
        for name, gradient in gradients_of(self.trainer):
            whole = self.reference.gradient(self.step, name)
            expected = shards.part_like(whole, self.trainer.parameters[name]).double()
            moved += float((shards.local(gradient).to(expected) - expected).square().sum())
            length += float(expected.square().sum())
        sums = gather_everywhere((moved, length))
        moved, length = (sum(of_ranks) for of_ranks in zip(*sums, strict=True))
        return math.sqrt(moved / length) if length else 0.0

    def _gradients(self) -> dict[str, Difference]:
        here = {name: shards.local(gradient) for name, gradient in gradients_of(self.trainer)}
        allowed = self.tolerance.relative * self.facts["largest"]
        if self.tolerance.statistical:
            gradients = compare_rounded(self.trainer, self.reference, self.step, "gradients", here, self.room.most)
        else:
            gradients = {}
            for name, gradient in here.items():
                expected = shards.part_like(self.reference.gradient(self.step, name), self.trainer.parameters[name])
                gradients[name] = measure(gradient, expected, allowed + self.room.of(name), self.rank)
            gradients = worst_over_ranks(gradients)
        for row in self.trainer.table:
            if row.trained:  # but no rank holds it
                gradients.setdefault(row.name, Difference(math.inf, allowed))
        return gradients

    def _updates(self) -> dict[str, Difference]:
        updates, trainer, facts, room = {}, self.trainer, self.facts, self.room
        if self.tolerance.statistical:
            here = {name: shards.local(parameter) for name, parameter in trainer.parameters.items()}
            slope = max(self.tolerance.slope, self.tolerance.muon_slope) * facts["factor"]
            least = {name: slope * room.after_clipping(name, facts) for name in here}
            return compare_rounded(trainer, self.reference, self.step, "weights", here, least)
        for name, parameter in trainer.parameters.items():
            expected = shards.part_like(self.reference.weight(self.step, name), parameter)
            allowed = self.tolerance.of_update(facts, largest_entry(expected), room.after_clipping(name, facts))
            updates[name] = measure(shards.local(parameter), expected, allowed, self.rank)
        return worst_over_ranks(updates)

    def _state(self) -> dict[str, Difference]:
        facts, room = self.facts, self.room
        state = compare_moments(
            self.trainer,
            self.reference,
            self.step,
            self.tolerance,
            facts,
            lambda name: room.after_clipping(name, facts),
        )
        load = self.trainer.train_step.balance.load
        if load is not None:
            expected_load = facts["expert_load"] or 0.0
            state["load of experts"] = Difference(abs(load - expected_load), 1e-9 * expected_load, self.rank)
        return worst_over_ranks(state)


def compare_moments(
    trainer: Trainer,
    reference: Reference,
    step: int,
    tolerance: Tolerance,
    facts: Facts,
    more: Callable[[str], float],
) -> dict[str, Difference]:
    """Buffers, and the optimizer's state, on this rank after a step; `more`: further tolerance of a parameter's
    gradient."""
    result, rank = {}, trainer.worker.rank
    for name, buffer in named_state(trainer.model).items():
        expected = shards.part_like(reference.state(step, name), buffer)
        allowed = tolerance.rounding * largest_entry(expected)
        result[name] = measure(shards.local(buffer), expected, allowed, rank)
    for name, moment, parameter in moments(trainer):
        expected = reference.moment(step, name)
        expected = shards.part_like(expected, parameter) if expected.dim() else expected
        of, _, key = name.rpartition(".")
        allowed = tolerance.of_moment(key, facts, step, largest_entry(expected), more(of))
        result[name] = measure(moment, expected, allowed, rank)
    return result


def worst_over_ranks(differences: dict[str, Difference]) -> dict[str, Difference]:
    """For every tensor that some rank holds, the difference that is largest relative to its allowance. Collective."""
    worst: dict[str, Difference] = {}
    for of_rank in gather_everywhere(differences):
        for name, difference in of_rank.items():
            if name not in worst or difference.share > worst[name].share:
                worst[name] = difference
    return worst


def check_readings(trainer: Trainer, microbatches: Sequence[HostBatch], step: int) -> Misread | None:
    """None if all ranks together read every sample of a step as often as the layout requires. Collective."""
    resolved, layout = trainer.resolved, trainer.resolved.run.layout
    if padding_of(resolved) == "left_out":
        return None  # rows are joined
    size = resolved.global_batch
    with Loader(samples_for(trainer), seed=resolved.run.training.seed, global_batch=size, micro_batch=size) as loader:
        (whole,) = loader.microbatches(step - 1)
    readings = gather_everywhere(_read(trainer, microbatches, whole))
    sharers = layout.world_size // layout.data_parallel
    return _apart(readings, layout.cp * layout.tp) or _judge(readings, size, resolved.run.data.sequence_length, sharers)


def _read(trainer: Trainer, microbatches: Sequence[HostBatch], whole: HostBatch) -> SamplesRead:
    everywhere = np.arange(whole.tokens.shape[1])
    places = everywhere if trainer.places is None else trainer.places
    rows: list[int | None] = []
    other = ""
    for microbatch in microbatches:
        here = places[: microbatch.tokens.shape[1]]  # padding may have been cut
        samples = {row.tobytes(): index for index, row in enumerate(whole.tokens[:, here])}
        indices = [samples.get(np.ascontiguousarray(row).tobytes()) for row in microbatch.tokens]
        for row, sample in enumerate(indices):
            if sample is not None and not other:
                other = _differs(microbatch, row, whole, sample, here)
        rows += indices
    return SamplesRead(tuple(rows), tuple(places.tolist()), other)


def _differs(microbatch: HostBatch, row: int, whole: HostBatch, sample: int, places: np.ndarray) -> str:
    assert microbatch.labels is not None
    assert whole.labels is not None
    if not np.array_equal(microbatch.labels[row], whole.labels[sample, places]):
        return f"the labels of sample {sample}"
    if microbatch.document_ids is not None and whole.document_ids is not None:
        length = microbatch.document_ids.shape[1]
        if not np.array_equal(microbatch.document_ids[row], whole.document_ids[sample, :length]):
            return f"the documents of sample {sample}"
    return ""


def _apart(readings: Sequence[SamplesRead], together: int) -> Misread | None:
    """Checks that `together` neighbouring ranks, which split one model or sequence, read the same samples."""
    for rank, reading in enumerate(readings):
        first = rank // together * together
        if reading.rows != readings[first].rows:
            row = next(row for row, (a, b) in enumerate(zip(reading.rows, readings[first].rows, strict=True)) if a != b)
            theirs = f"rank {first}, which shares its samples, read sample {readings[first].rows[row]}"
            return Misread(f"rank {rank} read sample {reading.rows[row]} of the step, but {theirs}", (rank,))
    return None


def _judge(readings: Sequence[SamplesRead], size: int, length: int, sharers: int) -> Misread | None:
    """Checks ranks among which `sharers` share each sample, by splitting its tokens or the model."""
    for rank, reading in enumerate(readings):
        if None in reading.rows:
            return Misread(f"rank {rank} read a sample that is not in the step", (rank,))
    for sample in range(size):
        ranks = tuple(rank for rank, reading in enumerate(readings) for row in reading.rows if row == sample)
        if len(ranks) != sharers:
            readers = "no rank" if not ranks else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            what = f"sample {sample} of the step was read by {readers}, but {sharers} should have read it"
            return Misread(what, ranks)
        counts = np.zeros(length, dtype=int)
        for rank in ranks:
            np.add.at(counts, list(readings[rank].places), 1)
        if counts.min() != counts.max():
            place = int(counts.argmin())
            return Misread(f"position {place} of sample {sample} was read by fewer ranks than other positions", ranks)
    for rank, reading in enumerate(readings):
        if reading.other:
            return Misread(f"{reading.other} on rank {rank} differ from the step's", (rank,))
    return None
