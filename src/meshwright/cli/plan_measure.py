"""`plan --measure`: trains the best layouts of a plan on the devices here, and compares predictions with the clock."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.common import positive, stoppable
from meshwright.cli.output import progress_on_stderr
from meshwright.planner.query import Planned
from meshwright.predict.candidate import Candidate
from meshwright.predict.explain import describe_candidate, short
from meshwright.predict.recipe import planned_run
from meshwright.spec.errors import UserError

GB = 1e9
LAYOUTS = 3
"""Strategies that are measured by default."""
WARM_UP, STEPS = 3, 8
"""Steps of each before and within the timing."""
PATIENCE = 600
"""Seconds without a step that end a layout's run."""


@dataclass(frozen=True)
class MeasuredLayout:
    """A layout that was trained here for some steps."""

    candidate: Candidate
    seconds: float | None
    """Median of its timed steps; None if it did not train."""
    peak_bytes: int | None = None
    """Most bytes that a rank held."""
    error: str | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return (self.seconds or 0.0) / self.candidate.time.total


def add_measure_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--measure`."""
    parser.add_argument(
        "--measure",
        metavar="N",
        nargs="?",
        type=positive,
        const=LAYOUTS,
        help=f"train the best layouts of N strategies (default {LAYOUTS}) on the devices here, {WARM_UP + STEPS} steps "
        "each, and choose by the clock; for --cluster local",
    )


def check_measurable(arguments: argparse.Namespace, planned: Sequence[Planned]) -> None:
    """Raise `UserError` unless the plan is for this machine alone."""
    cluster = planned[0].plan.case.cluster
    if len(planned) > 1 or cluster.name != "local":
        raise UserError(
            f"--measure trains on the devices here, but the plan is for {planned[-1].plan.case.cluster.name}; give "
            "--cluster local, or the file of meshwright plan calibrate"
        )
    if arguments.explain:
        raise UserError("--explain derives a prediction, --measure replaces it; leave one of them out")


def measure_layouts(planned: Planned, count: int, base_dir: Path) -> list[MeasuredLayout]:
    """Train the best layouts of the best strategies, one after another: together they would share the devices."""
    from meshwright.engines.compare import Contestant, Pace, compare  # loads torch
    from meshwright.engines.registry import find_engine
    from meshwright.trainer.resolve import resolve_run

    plan, measured = planned.plan, list[MeasuredLayout]()
    best = sorted(plan.searched.strategies.values(), key=lambda candidate: candidate.cost)
    runnable = [one for one in best if one.verdict != "does not fit" and not plan.refusal(one)]
    with tempfile.TemporaryDirectory() as folder, progress_on_stderr(True), stoppable("the measurement"):
        for number, candidate in enumerate(runnable[:count]):
            print(f"measuring {describe_candidate(candidate)}", file=sys.stderr, flush=True)
            run = planned_run(planned.recipe, plan, chosen=candidate)
            resolved = resolve_run(run, base_dir=base_dir.resolve())
            contestant = Contestant(
                name="meshwright", engine=find_engine("meshwright"), resolved=resolved, python=Path(sys.executable)
            )
            place = Path(folder) / str(number)
            place.mkdir()
            (row,) = compare([contestant], place, pace=Pace(1, STEPS, WARM_UP), patience=PATIENCE, say=lambda _: None)
            seconds = None if row.error else statistics.median(row.turns[0])
            measured.append(MeasuredLayout(candidate, seconds, row.peak_bytes, row.error))
    return measured


def fastest(measured: Sequence[MeasuredLayout]) -> MeasuredLayout | None:
    """The layout with the shortest measured step; None if none trained."""
    trained = [one for one in measured if one.seconds is not None]
    return min(trained, key=lambda one: one.seconds or 0.0, default=None)


def measured_facts(measured: Sequence[MeasuredLayout]) -> list[dict[str, Any]]:
    """The measurements as plain data."""
    return [
        {
            "layout": describe_candidate(one.candidate),
            "predicted_seconds": one.candidate.time.total,
            "seconds": one.seconds,
            "predicted_bytes": one.candidate.memory.total,
            "bytes": one.peak_bytes,
            "error": one.error,
        }
        for one in measured
    ]


def measured_lines(measured: Sequence[MeasuredLayout], chosen: Candidate | None) -> Iterator[str]:
    """The measurements as a table, the correction that follows from them, and the choice by the clock."""
    if not measured:
        return
    yield ""
    yield f"measured here, medians of {STEPS} steps; memory as predicted and as measured:"
    yield f"{'predicted':>20}{'measured':>11}{'':>7}{'memory GB':>16}  layout"
    for one in measured:
        interval = one.candidate.seconds
        predicted = f"{short(interval.value)} s ({short(interval.low)}-{short(interval.high)})"
        clock = "failed" if one.seconds is None else f"{short(one.seconds)} s"
        off = "" if one.seconds is None else f"{one.ratio - 1:+.0%}"
        held = f"{one.candidate.memory.total / GB:.1f}, " + (
            "-" if one.peak_bytes is None else f"{one.peak_bytes / GB:.1f}"
        )
        yield f"{predicted:>20}{clock:>11}{off:>7}{held:>16}  {describe_candidate(one.candidate)}"
        if one.error:
            yield f"{'':>56}{one.error.splitlines()[-1]}"
    best = fastest(measured)
    if best is None or best.seconds is None:
        yield "no layout trained, so the predictions stand"
        return
    correction = statistics.median(one.ratio for one in measured if one.seconds is not None)
    yield f"correction     multiply predicted seconds on this machine by {correction:.2f}, the median"
    own = next((one for one in measured if one.candidate is chosen and one.seconds is not None), None)
    if own is best:
        yield "by the clock   the plan's choice is the fastest of these"
    else:
        than = "" if own is None or own.seconds is None else f", {1 - best.seconds / own.seconds:.0%} less than planned"
        yield f"by the clock   {describe_candidate(best.candidate)}{than}"
