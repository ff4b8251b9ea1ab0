"""The one place that says how long a pipeline of unequal stages takes for all microbatches of a step."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.schedule import build_schedule, is_asynchronous, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

PROBE_RANKS = 4
"""Ranks of the small pipeline in which a schedule's bubble is measured."""


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step's forward and backward passes."""

    total: float
    bubble: float
    """What the busiest stage waits for the others."""


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    virtual: int,
    send: float,
    schedule: str = "1f1b",
) -> Timeline:
    """Seconds for `microbatches` through stages of the given forward and backward seconds.

    The busiest stage is never idle once the pipeline is full; before and after, a microbatch passes the other stages
    once in each direction, of which a schedule hides its share (Narayanan et al., 2021, section 2.2). `send` is the
    time of one message, paid on the way in and out.
    """
    stages = len(forward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    busiest = max(both)
    steady = microbatches * busiest
    if stages == 1:
        return Timeline(steady, 0.0)
    bubble = (sum(both) - busiest) * bubble_share(schedule, virtual) + 2 * (stages - 1) * send
    return Timeline(steady + bubble, bubble)


@functools.cache
def bubble_share(schedule: str, virtual: int) -> float:
    """The bubble of a schedule as a share of 1F1B's, read off its timeline with equal stages."""
    if schedule in ("1f1b", "interleaved-1f1b", "afab", "looped-bfs"):
        return 1 / virtual
    if is_asynchronous(schedule):  # filled once in a run
        return 0.0
    microbatches = nearest_microbatches(schedule, PROBE_RANKS, 4 * PROBE_RANKS, virtual)
    built = build_schedule(schedule, ranks=PROBE_RANKS, microbatches=microbatches, stages_per_rank=virtual)
    timeline = simulate(built, StageCosts.equal(PROBE_RANKS * virtual))
    idle = timeline.duration - microbatches * virtual * 3.0
    return idle / ((PROBE_RANKS - 1) * virtual * 3.0)
