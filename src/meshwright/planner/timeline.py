"""The step of a planned layout over real seconds: every pass of every pipeline rank, with its parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.predict.candidate import Candidate
from meshwright.predict.step_time import StepModel
from meshwright.spec.schedule import build_schedule, nearest_microbatches
from meshwright.spec.timeline import StageCosts, TimedAction, simulate

MOST_RANKS = 32
"""Pipeline ranks that are drawn."""
MOST_PASSES = 900
"""Passes that are drawn, of all ranks together."""


@dataclass(frozen=True)
class StepPart:
    """A part of a step on one rank."""

    kind: str
    """forward, backward, weights, recompute, communication, gradients or update."""
    start: float
    end: float
    about: str


@dataclass(frozen=True)
class StepTimeline:
    """A step, or its beginning and end if it has too many microbatches to draw."""

    ranks: tuple[tuple[StepPart, ...], ...]
    """For every pipeline rank, in order."""
    microbatches: int
    """Those that are drawn, of `of`."""
    of: int
    seconds: float
    """The end of what is drawn."""


@dataclass(frozen=True)
class _Parts:
    """One microbatch on one pipeline rank, of all its stages, in seconds."""

    forward: float
    backward: float
    """With `again`."""
    again: float
    """Recomputation."""
    forward_wire: float
    """The part of the forward pass that is exposed communication."""
    backward_wire: float


def step_timeline(candidate: Candidate) -> StepTimeline | None:
    """The step of a layout; None if it has too many stages, or a schedule of its own."""
    job, layout = candidate.job, candidate.job.layout
    if layout.pp > MOST_RANKS or layout.schedule.endswith(".csv"):
        return None
    model = StepModel(job, candidate.cluster)
    parts = [_parts(model, rank) for rank in range(layout.pp)]
    virtual = layout.virtual_stages
    most = max(2 * layout.pp, MOST_PASSES // (2 * layout.pp * virtual))
    count = job.microbatches
    if count > most:
        count = nearest_microbatches(layout.schedule, layout.pp, most, virtual)
    schedule = build_schedule(layout.schedule, ranks=layout.pp, microbatches=count, stages_per_rank=virtual)
    shares = {
        stage: (rank, job.cut[stage] / max(1, job.stage_layers[rank]))
        for rank, stages in enumerate(job.stages)
        for stage in stages
    }
    of = [(parts[shares[stage][0]], shares[stage][1]) for stage in range(len(job.cut))]
    costs = StageCosts(
        forward=tuple(part.forward * share for part, share in of),
        backward_input=tuple((part.backward + part.again) / 2 * share for part, share in of),
        backward_weight=tuple((part.backward - part.again) / 2 * share for part, share in of),
        transfer=model.send(),
    )
    timeline = simulate(schedule, costs)
    begin, last = timeline.duration, max(range(layout.pp), key=lambda rank: parts[rank].backward)
    gradients = model.gradients(parts[last].backward)
    update = candidate.time.update
    ranks = tuple(
        (
            *(span for timed in spans for span in _of_action(timed, *of[timed.action.stage])),
            StepPart("communication", begin, begin + gradients, "exchange of gradients"),
            StepPart("update", begin + gradients, begin + gradients + update, "clipping and optimizer"),
        )
        for spans in timeline.ranks
    )
    return StepTimeline(ranks, count, job.microbatches, begin + gradients + update)


def _parts(model: StepModel, rank: int) -> _Parts:
    job, passes = model.job, model.passes(rank)
    wire = [passes.exposed]
    for kind, count in job.stage_kinds[rank]:
        block = model.parts.blocks[kind]
        wire.append((block.tensor + block.expert + block.context).scaled(count))
    return _Parts(
        passes.whole.forward,
        passes.whole.backward,
        passes.repeated,
        sum(one.forward for one in wire),
        sum(one.backward for one in wire),
    )


def _of_action(timed: TimedAction, parts: _Parts, share: float) -> Iterator[StepPart]:
    """An action as its parts one after another: recomputation first, communication that nothing hides last."""
    kind, stage, microbatch = timed.action
    about = f"microbatch {microbatch}" + (f", stage {stage}" if share < 1 else "")
    again = parts.again * share if kind in ("B", "I") else 0.0
    wire = 0.0 if kind == "W" else share * (parts.forward_wire if kind == "F" else parts.backward_wire)
    wire = min(wire, timed.end - timed.start - again)
    name = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}[kind]
    begin, end = timed.start + again, timed.end - wire
    if again:
        yield StepPart("recompute", timed.start, begin, f"{about}: recomputation")
    yield StepPart(name, begin, end, f"{about}: {LONG[kind]}")
    if wire:
        yield StepPart("communication", end, timed.end, f"{about}: communication that nothing hides")


LONG = {
    "F": "forward pass",
    "B": "backward pass",
    "I": "backward pass, gradients of inputs",
    "W": "backward pass, gradients of weights",
}
