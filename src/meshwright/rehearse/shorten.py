"""Shortened steps: a few microbatches suffice, because the middle of a step repeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.parallel import Passes
from meshwright.parallel.pipeline import Pipeline, plan_stages
from meshwright.parallel.traffic import Traffic
from meshwright.spec.actions import Schedule, ScheduleError
from meshwright.spec.run import ResolvedRun
from meshwright.spec.timeline import in_flight

MOST_TRIED = 64
"""Numbers of microbatches tried, to find a step with the same peak as the whole step."""


@dataclass(frozen=True)
class Observed:
    """One rank's counters of a step."""

    flops: int
    peak: int
    """Most bytes allocated at once; the batch's own bytes grow with it."""
    traffic: dict[tuple[str, str], tuple[int, int]]
    """(kind, axis) -> calls, bytes."""

    @classmethod
    def of(cls, traffic: Traffic, flops: int, peak: int) -> "Observed":
        """From the counters of a step."""
        return cls(flops, peak, {key: (count.calls, count.bytes) for key, count in traffic.counts.items()})


def enough_microbatches(resolved: ResolvedRun) -> tuple[int, ...]:
    """All of a step's microbatches; or, if there are many, two smaller numbers to extrapolate from.

    Without stages, the first and the last microbatch are special: 2 and 3. In a pipeline: take the smallest number with
    which all ranks hold as many at once as in the whole step; return the next two numbers that the schedule accepts.
    With overlapping steps: two whole steps, the first of which only fills the pipeline.
    """
    many, layout = resolved.accumulation, resolved.run.layout
    if layout.asynchronous:
        return (many, many)
    if layout.pp == 1:
        return (2, 3) if many > 5 else (many,)
    held, counts = in_flight(_schedule(resolved, many)), []
    for count in range(1, min(many, MOST_TRIED + 1)):
        try:
            schedule = _schedule(resolved, count)
        except ScheduleError:
            continue
        if in_flight(schedule) == held:
            counts.append(count)
        if len(counts) == 3:  # with the first number, sends and receives do not yet overlap at the peak
            few, more = counts[1:]
            regular = (many - few) % (more - few) == 0  # longer by a multiple of the difference
            return (few, more) if few + more < many and regular else (many,)
    return (many,)


def _schedule(resolved: ResolvedRun, count: int) -> Schedule:
    return resolved.run.layout.pipeline_schedule(microbatches=count, base_dir=Path(resolved.base_dir))


def set_microbatches(passes: Passes, resolved: ResolvedRun, count: int) -> None:
    """Set the number of microbatches of a step; only pipelines need to know it in advance."""
    if isinstance(passes, Pipeline):
        passes.use_schedule(plan_stages(resolved.model_copy(update={"accumulation": count})))


def continued(runs: Sequence[Observed], counts: Sequence[int], many: int) -> Observed:
    """The counters of a step of `many` microbatches: the last observed ones, or linearly extrapolated."""
    if counts[-1] == many:
        return runs[-1]
    (one, two), (few, more) = runs, counts
    times = (many - more) / (more - few)

    def line(before: float, after: float) -> int:
        return round(after + times * (after - before))

    traffic = {
        key: (line(one.traffic.get(key, (0, 0))[0], calls), line(one.traffic.get(key, (0, 0))[1], size))
        for key, (calls, size) in two.traffic.items()
    }
    return Observed(line(one.flops, two.flops), line(one.peak, two.peak), traffic)
