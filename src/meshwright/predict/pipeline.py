"""Pipelines of unequal stages: a step's time and a rank's microbatches in flight, derived from the schedule with equal
stages.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.actions import Schedule
from meshwright.spec.schedule import build_schedule, is_asynchronous, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

PROBE_RANKS = 6
PROBE_ROUNDS = 2
"""Ranks of the pipeline in which longer ones' bubbles are measured, and rounds of microbatches after which the bubble
no longer depends on their number."""

TRANSFER = 0.01
UNIT = 3.0
"""Time of a microbatch on a stage of `StageCosts.equal`."""


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of a step's forward and backward passes."""

    total: float
    bubble: float
    """Waiting time of the busiest stage, messages included."""
    messages: float
    """The part of `bubble` due to messages."""


@dataclass(frozen=True)
class PipelineWaiting:
    """Waiting time of a rank in a pipeline of equal stages, per step."""

    share: float
    """Idle time over a microbatch's time on all the other ranks: 1 for 1F1B."""
    messages: float
    """Messages during fill and drain, per other rank."""
    each: float
    """Messages that each microbatch waits for once the pipeline is full: in 1F1B neighbours wait for one another."""


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    virtual: int,
    send: float,
    schedule: str = "1f1b",
) -> PipelineTime:
    """Seconds for `microbatches` through ranks that take the given forward and backward seconds for each.

    The busiest rank computes without a pause once the pipeline is full; before and after, it waits for the others as
    the schedule requires. `send` is the time of one message.
    """
    stages = len(forward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    busiest = max(both)
    steady = microbatches * busiest
    if stages == 1:
        return PipelineTime(steady, 0.0, 0.0)
    waiting = schedule_waiting(schedule, stages, microbatches, virtual)
    messages = (waiting.messages * (stages - 1) + waiting.each * microbatches) * send
    bubble = (sum(both) - busiest) * waiting.share + messages
    return PipelineTime(steady + bubble, bubble, messages)


def schedule_waiting(schedule: str, ranks: int, microbatches: int, virtual: int) -> PipelineWaiting:
    """The bubble of a schedule, from its timeline; for many ranks, from a shorter pipeline filled to the same
    degree."""
    if is_asynchronous(schedule):  # filled once in a run
        return PipelineWaiting(0.0, 0.0, 2.0)
    few = min(ranks, PROBE_RANKS)
    like = min(max(1, round(microbatches * few / ranks)), PROBE_ROUNDS * few)
    return _probe(schedule, few, nearest_microbatches(schedule, few, like, virtual), virtual)


@functools.cache
def _probe(schedule: str, ranks: int, microbatches: int, virtual: int) -> PipelineWaiting:
    others, work = ranks - 1, UNIT * virtual
    double = nearest_microbatches(schedule, ranks, 2 * microbatches, virtual)
    still, slow = (_seconds(schedule, ranks, microbatches, virtual, transfer) for transfer in (0.0, TRANSFER))
    later = _seconds(schedule, ranks, double, virtual, TRANSFER) - _seconds(schedule, ranks, double, virtual, 0.0)
    each = max(0.0, (later - slow + still) / TRANSFER / max(1, double - microbatches))
    messages = max(0.0, (slow - still) / TRANSFER - each * microbatches)
    return PipelineWaiting((still - microbatches * work) / (others * work), messages / others, each)


def _seconds(schedule: str, ranks: int, microbatches: int, virtual: int, transfer: float) -> float:
    return simulate(
        _built(schedule, ranks, microbatches, virtual), StageCosts.equal(ranks * virtual, transfer=transfer)
    ).duration


@functools.lru_cache(maxsize=64)
def _built(schedule: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    return build_schedule(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=virtual)


def most_in_flight(
    schedule: str, rank: int, microbatches: int, virtual: int, layers: Sequence[int], *, at_loss: bool = False
) -> float:
    """Microbatches whose activations a rank holds at its peak, in whole passes through all its stages; `layers` is the
    number of layers of every stage. `at_loss`: when it computes losses, which is not the peak where stages go there and
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
    """For every rank, the most unfinished passes at any time, and when it computes losses."""
    built = _built(schedule, ranks, microbatches, virtual)
    of_ranks = []
    for rank, actions in enumerate(built.ranks):
        held = most = at_loss = 0
        for kind, stage, _ in actions:
            held += {"F": layers[stage], "I": 0}.get(kind, -layers[stage])
            most = max(most, held)
            if kind == "F" and stage == built.num_stages - 1:
                at_loss = max(at_loss, held)
        whole = sum(layers[stage] for stage in built.stages_of(rank))
        of_ranks.append((most / whole, at_loss / whole))
    return tuple(of_ranks)
