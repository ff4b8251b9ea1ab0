"""The one place that says how long a pipeline of unequal stages takes for all microbatches of a step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step's forward and backward passes."""

    total: float
    bubble: float
    """What the busiest stage waits for the others."""


def pipeline_seconds(
    forward: Sequence[float], backward: Sequence[float], microbatches: int, virtual: int, send: float
) -> Timeline:
    """Seconds for `microbatches` through stages of the given forward and backward seconds, 1F1B or interleaved.

    The busiest stage is never idle once the pipeline is full; before and after, a microbatch passes the other stages
    once in each direction, divided by the number of virtual stages (Narayanan et al., 2021, section 2.2). `send` is
    the time of one message, paid on the way in and out and, with virtual stages, around the ring.
    """
    stages = len(forward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    busiest = max(both)
    steady = microbatches * busiest
    if stages == 1:
        return Timeline(steady, 0.0)
    bubble = (sum(both) - busiest) / virtual + 2 * (stages - 1) * send
    return Timeline(steady + bubble, bubble)
