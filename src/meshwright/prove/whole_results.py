"""The results of whole steps (`prove/whole.py`): recorded by the reference, compared by the layout's ranks.

After an update, weights differ by rounding, which moves the next gradients. The reference measures how far: it computes
gradients once more with weights moved by the allowed difference, in random directions. They may differ `SWAY` times as
far.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, log, log2
from typing import TypedDict

import torch

from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.prove.compare import compare_moments, worst_over_ranks
from meshwright.prove.difference import Difference, largest_entry, measure
from meshwright.prove.gathered import recorded_rounding, room_of
from meshwright.prove.locate import Location
from meshwright.prove.reference import Reference, facts_of, gradients_of, load_weights, loader_for, save_state
from meshwright.prove.tolerance import Facts, Tolerance, derive_tolerance
from meshwright.prove.whole import LATE_STEPS, SKIPPED, Defined, DefinedLate, Event, Trained, program
from meshwright.spec.layout import LayoutSpec
from meshwright.trainer.setup import Trainer

SWAY = 4.0
"""By how much a sensitivity measured in random directions is enlarged, because other directions may be worse."""

REPEATS = 4
"""Reductions of one batch under error feedback: without it, their errors add up."""

EXACT = ("terms", "tokens", "skipped", "loss scale")
"""Figures without rounding."""

SMOOTH = ("loss", "norm")
"""Figures that rounding moves little; others count choices."""

LARGEST = 2.0**8
"""The largest gradient in a proof in fp16, as scaled: it does not overflow, and an enlarged one does."""


class Record(TypedDict):
    """What the reference records, in `whole.json`."""

    events: list[tuple[str, dict[str, float]]]
    """Names and figures."""
    facts: Facts
    """The largest of all updates."""
    sway: dict[str, float]
    """How far the loss, the norm (both relative) and any number of a gradient move with the weights."""


@dataclass(frozen=True)
class WholeComparison:
    """The comparison of one event, the same on every rank."""

    name: str
    numbers: dict[str, Difference]
    tensors: dict[str, Difference] = field(default_factory=dict)
    """Weights, buffers and moments, if they are compared; of a skipped step, those that it changed."""

    @property
    def is_scaled(self) -> bool:
        """Whether its loss is near the largest number of the dtype, so that only relative differences mean anything."""
        return self.name == SKIPPED

    @property
    def wrong(self) -> tuple[str, Difference] | None:
        """The first figure or tensor that differs."""
        both = [*self.numbers.items(), *self.tensors.items()]
        return next(((name, difference) for name, difference in both if not difference.equal), None)


def record_whole(trainer: Trainer, layout: LayoutSpec, reference: Reference, done: int, tolerance: Tolerance) -> None:
    """Run the program on the reference, after `done` steps, and save its results."""
    stepper = DefinedLate(trainer, layout) if layout.asynchronous else Defined(trainer, layout)
    sway, facts = _measure_sway(trainer, stepper, reference, done, tolerance)
    events = []
    for event in program(trainer, stepper, done):
        facts = _merged(facts, stepper.facts)
        events.append((event.name, event.numbers))
        if event.step:
            save_state(reference, trainer, event.step)
    record = Record(events=events, facts=facts, sway=sway)
    (reference.folder / "whole.json").write_text(json.dumps(record))


def _measure_sway(
    trainer: Trainer, stepper: Defined, reference: Reference, done: int, tolerance: Tolerance
) -> tuple[dict[str, float], Facts]:
    generator = torch.Generator().manual_seed(0)
    with loader_for(trainer) as loader:
        microbatches = loader.microbatches(done)
        loss, _ = stepper.gradients(microbatches)
        gnorm = trainer.train_step.gradient_norm()
        facts = facts_of(trainer, loss, gnorm)
        for name, gradient in gradients_of(trainer):
            reference.save(gradient, "sway", name)
        trainer.store.zero_grad()
        with torch.no_grad():
            for parameter in trainer.parameters.values():
                amount = LATE_STEPS * tolerance.of_update(facts, largest_entry(parameter))
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter += (amount * signs).to(parameter.dtype)
        trainer.store.refresh()
        moved_loss, _ = stepper.gradients(microbatches)
        moved_gnorm = trainer.train_step.gradient_norm()
    moved = [largest_entry(gradient - reference.tensor("sway", name)) for name, gradient in gradients_of(trainer)]
    trainer.store.zero_grad()
    load_weights(trainer, reference, done)
    sway = {
        "loss": abs(moved_loss - loss) / abs(loss) if loss else 0.0,
        "norm": abs(moved_gnorm - gnorm) / gnorm if gnorm else 0.0,
        "gradient": max(moved, default=0.0),
    }
    return sway, facts


def _merged(facts: Facts, other: Facts | None) -> Facts:
    if other is None:
        return facts
    most = {key: max(facts[key], other[key]) for key in ("loss", "gnorm", "largest", "factor")}
    return {**other, **most, "smallest_norm": min(facts["smallest_norm"], other["smallest_norm"])}  # type: ignore[typeddict-item]


def compare_whole(trainer: Trainer, reference: Reference, done: int, tolerance: Tolerance) -> list[WholeComparison]:
    """Run the program under the layout and compare; the last comparison is the first that differs. Collective."""
    record = _read_record(reference)
    judge = _Judge(trainer, reference, tolerance, record)
    comparisons = judge.compare_all(program(trainer, Trained(trainer), done), record["events"])
    if not comparisons[-1].wrong and trainer.resolved.run.layout.gradient_error_feedback:
        comparisons.append(judge.repeated(done))
    return comparisons


def compare_own(trainer: Trainer, reference: Reference, done: int) -> Location | None:
    """Make the single and the whole steps in the recipe's own precision; the first that differs from the reference, in
    float64, by more than the bound on a single number. Collective.

    None for low-precision products, whose rounding is about as large as their results.
    """
    if trainer.resolved.run.training.product_recipe is not None:
        return None
    record, scaler = _read_record(reference), trainer.train_step.scaler
    if scaler is not None:
        scaler.scale = 2.0 ** int(log2(LARGEST / record["facts"]["largest"]))
    tolerance = replace(derive_tolerance(trainer.resolved), statistical=False)
    judge = _Judge(trainer, reference, tolerance, {**record, "sway": dict.fromkeys(record["sway"], 0.0)}, own=True)
    single = [(f"step {step}", _single_figures(reference.facts(step))) for step in range(1, done + 1)]
    comparisons = judge.compare_all(_own_program(trainer, reference, done), [*single, *record["events"]])
    wrong = locate_whole(comparisons)
    compute = trainer.resolved.run.training.dtypes.compute
    return wrong and replace(wrong, phase="formats", name=f"{wrong.name} in {compute}")


def _own_program(trainer: Trainer, reference: Reference, done: int) -> Iterator[Event]:
    stepper = Trained(trainer)
    with loader_for(trainer) as loader:
        for step in range(1, done + 1):
            load_weights(trainer, reference, step - 1)
            yield Event(f"step {step}", stepper(step, loader.microbatches(step - 1)), updates=1, step=step)
    load_weights(trainer, reference, done)
    yield from program(trainer, stepper, done)


def _single_figures(facts: Facts) -> dict[str, float]:
    return {"loss": facts["loss"], "norm": facts["gnorm"], "skipped": 0.0}


def _read_record(reference: Reference) -> Record:
    return json.loads((reference.folder / "whole.json").read_text())


class _Judge:
    """Compares events with the reference's. `own`: in the recipe's own precision, with a reference in float64."""

    def __init__(
        self, trainer: Trainer, reference: Reference, tolerance: Tolerance, record: Record, *, own: bool = False
    ) -> None:
        self.trainer, self.reference, self.tolerance, self.rank = trainer, reference, tolerance, trainer.worker.rank
        self.facts, self.sway, self.own = record["facts"], record["sway"], own
        layout = trainer.resolved.run.layout
        self.rounds = layout.quantized_gradients != "none"
        """Whether an update differs by more than summation order explains."""

    def compare_all(
        self, events: Iterable[Event], expected: Sequence[tuple[str, dict[str, float]]]
    ) -> list[WholeComparison]:
        """Events up to the first that differs."""
        comparisons = []
        for event, of_reference in zip(events, expected, strict=True):
            comparisons.append(self.compare(event, *of_reference))
            if comparisons[-1].wrong:
                break
        return comparisons

    def compare(self, event: Event, name: str, expected: dict[str, float]) -> WholeComparison:
        """One event."""
        assert event.name == name
        numbers = {key: self._number(event, key, expected[key]) for key in expected if self._is_comparable(event, key)}
        tensors = {one: Difference(inf, 0.0, self.rank) for one in event.changed}
        if event.step and not self.rounds and not self.tolerance.statistical:
            tensors |= self._state(event)
        if event.step and event.updates:
            tensors |= self._forgotten()
        return WholeComparison(name, worst_over_ranks(numbers), worst_over_ranks(tensors))

    def _is_comparable(self, event: Event, key: str) -> bool:
        if key not in event.numbers:
            return False
        if self.own and key not in EXACT and (key not in SMOOTH or event.name == SKIPPED):
            return False
        return key in EXACT or not self.rounds or (event.updates <= 1 and key != "norm")

    def _number(self, event: Event, key: str, expected: float) -> Difference:
        ours = event.numbers[key]
        if key in EXACT or not isfinite(expected):
            same = ours == expected if isfinite(expected) else not isfinite(ours)
            return Difference(0.0 if same else inf, 0.0, self.rank)
        size = abs(expected)
        if event.name == "margins":  # a difference of sums over answers
            size = self.trainer.resolved.run.data.sequence_length * log(self.trainer.resolved.model.vocab)
        swayed = SWAY * self.sway.get(key, self.sway["loss"]) if event.updates > 1 else 0.0
        allowed = (self.tolerance.relative + swayed) * size
        return Difference(abs(ours - expected) if isfinite(ours) else inf, allowed, self.rank)

    def _state(self, event: Event) -> dict[str, Difference]:
        """Weights, buffers and moments after an event."""
        result, more = {}, SWAY * self.sway["gradient"]
        for name, parameter in self.trainer.parameters.items():
            expected = shards.part_like(self.reference.weight(event.step, name), parameter)
            allowed = event.updates * self.tolerance.of_update(self.facts, largest_entry(expected), more)
            result[name] = measure(shards.local(parameter), expected, allowed, self.rank)
        state = compare_moments(self.trainer, self.reference, event.step, self.tolerance, self.facts, lambda _: more)
        choices = named_state(self.trainer.model) if self.own else ()
        return result | {name: difference for name, difference in state.items() if name not in choices}

    def _forgotten(self) -> dict[str, Difference]:
        """Errors of quantized gradients that are zero after a step: rounding leaves none of them without any."""
        kept = self.trainer.train_step.feedback.tensors(self.rank)
        return {name: Difference(inf, 0.0, self.rank) for name, errors in kept.items() if not errors.any()}

    def repeated(self, done: int) -> WholeComparison:
        """One batch's gradient, reduced `REPEATS` times with error feedback: all but two errors are repaid."""
        trainer, resolved = self.trainer, self.trainer.resolved
        load_weights(trainer, self.reference, done - 1)
        trainer.train_step.feedback.drop()
        sums: dict[str, torch.Tensor] = {}
        with loader_for(trainer) as loader, recorded_rounding(trainer.model) as rounding:
            for _ in range(REPEATS):
                trainer.train_step.gradients(loader.microbatches(done - 1))
                for name, gradient in gradients_of(trainer):
                    local = shards.local(gradient)
                    sums[name] = sums[name] + local if name in sums else local.clone()
                trainer.store.zero_grad()
        trainer.train_step.feedback.drop()
        room, facts = (
            room_of(rounding, resolved.run.layout, tied=resolved.model.tied_embeddings),
            self.reference.facts(done),
        )
        result = {}
        for name, total in sums.items():
            expected = REPEATS * shards.part_like(self.reference.gradient(done, name), trainer.parameters[name])
            allowed = REPEATS * self.tolerance.relative * facts["largest"] + room.of(name)
            result[name] = measure(total, expected, allowed, self.rank)
        return WholeComparison("repeated gradient", {}, worst_over_ranks(result))


def locate_whole(comparisons: list[WholeComparison]) -> Location | None:
    """The first event that differs, and what differs in it."""
    for comparison in comparisons:
        if comparison.wrong:
            what, difference = comparison.wrong
            return Location("whole", f"{comparison.name}: {what}", difference, (difference.rank,))
    return None
