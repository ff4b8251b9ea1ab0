"""Pipelines of unequal stages: the time of a step's microbatches and how many a rank holds, read off the schedule with
equal stages.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.schedule import build_schedule, is_asynchronous, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

PROBE_RANKS = 6
PROBE_ROUNDS = 2
"""Ranks of the pipeline in which the bubble of longer ones is measured, and rounds of microbatches after which it no
longer depends on their number."""

TRANSFER = 0.01
UNIT = 3.0
"""What a microbatch takes on a stage of `StageCosts.equal`."""


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step's forward and backward passes."""

    total: float
    bubble: float
    """What the busiest stage waits for the others, messages included."""
    messages: float
    """The part of it in which messages travel."""


@dataclass(frozen=True)
class Waiting:
    """What a rank of a pipeline of equal stages waits for in a step."""

    share: float
    """Idle time over what a microbatch takes on all the other ranks: 1 for 1F1B."""
    messages: float
    """Messages on the way in and out, for every other rank."""
    each: float
    """Messages that every microbatch waits for once the pipeline is full: 1F1B's neighbours wait for one another."""


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    virtual: int,
    send: float,
    schedule: str = "1f1b",
) -> Timeline:
    """Seconds for `microbatches` through ranks that take the given forward and backward seconds for each.

    The busiest rank computes without a pause once the pipeline is full; before and after, it waits for the others, as
    long as the schedule makes it. `send` is the time of one message.
    """
    stages = len(forward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    busiest = max(both)
    steady = microbatches * busiest
    if stages == 1:
        return Timeline(steady, 0.0, 0.0)
    waiting = schedule_waiting(schedule, stages, microbatches, virtual)
    messages = (waiting.messages * (stages - 1) + waiting.each * microbatches) * send
    bubble = (sum(both) - busiest) * waiting.share + messages
    return Timeline(steady + bubble, bubble, messages)


def schedule_waiting(schedule: str, ranks: int, microbatches: int, virtual: int) -> Waiting:
    """The bubble of a schedule, off its timeline; that of many ranks off a shorter pipeline as full as theirs."""
    if is_asynchronous(schedule):  # filled once in a run
        return Waiting(0.0, 0.0, 2.0)
    few = min(ranks, PROBE_RANKS)
    like = min(max(1, round(microbatches * few / ranks)), PROBE_ROUNDS * few)
    return _probe(schedule, few, nearest_microbatches(schedule, few, like, virtual), virtual)


@functools.cache
def _probe(schedule: str, ranks: int, microbatches: int, virtual: int) -> Waiting:
    others, work = ranks - 1, UNIT * virtual
    double = nearest_microbatches(schedule, ranks, 2 * microbatches, virtual)
    still, slow = (_seconds(schedule, ranks, microbatches, virtual, transfer) for transfer in (0.0, TRANSFER))
    later = _seconds(schedule, ranks, double, virtual, TRANSFER) - _seconds(schedule, ranks, double, virtual, 0.0)
    each = max(0.0, (later - slow + still) / TRANSFER / max(1, double - microbatches))
    messages = max(0.0, (slow - still) / TRANSFER - each * microbatches)
    return Waiting((still - microbatches * work) / (others * work), messages / others, each)


def _seconds(schedule: str, ranks: int, microbatches: int, virtual: int, transfer: float) -> float:
    built = build_schedule(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=virtual)
    return simulate(built, StageCosts.equal(ranks * virtual, transfer=transfer)).duration


def most_in_flight(
    schedule: str, rank: int, microbatches: int, virtual: int, layers: Sequence[int], *, at_loss: bool = False
) -> float:
    """Microbatches whose activations a rank holds at its peak, in whole passes through all its stages; `layers` are
    those of every stage. `at_loss`: when it computes losses, which is not when it holds most where stages go there and
    back."""
    ranks = len(layers) // virtual
    if schedule in ("afab", "looped-bfs"):
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, ranks - rank)
    if schedule == "interleaved-1f1b":
        chunks = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
        return min(microbatches * virtual, chunks) / virtual
    enough = nearest_microbatches(schedule, ranks, min(microbatches, PROBE_ROUNDS * ranks), virtual)
    return _held(schedule, ranks, enough, virtual, tuple(layers))[rank][at_loss]


@functools.cache
def _held(
    schedule: str, ranks: int, microbatches: int, virtual: int, layers: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Of every rank the most passes that it has begun and not finished, at any time and when it computes losses."""
    built = build_schedule(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=virtual)
    found = []
    for rank, actions in enumerate(built.ranks):
        held = most = at_loss = 0
        for kind, stage, _ in actions:
            held += {"F": layers[stage], "I": 0}.get(kind, -layers[stage])
            most = max(most, held)
            if kind == "F" and stage == built.num_stages - 1:
                at_loss = max(at_loss, held)
        whole = sum(layers[stage] for stage in built.stages_of(rank))
        found.append((most / whole, at_loss / whole))
    return tuple(found)
