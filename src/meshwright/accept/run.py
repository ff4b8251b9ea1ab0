"""Runs the steps, each in a process of its own, and writes the report after each: a machine may be lost at any time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.accept.check import Check, Place, read_checks
from meshwright.accept.steps import Step

LEAST = 15
"""Seconds below which a step is not begun."""
RESULTS, WORK = "steps", "work"
"""Folders of the report: what each step wrote, and its runs."""


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step."""

    step: Step
    state: str
    """passed, failed, or not run."""
    seconds: float = 0.0
    checks: Sequence[Check] = field(default_factory=list)
    note: str = ""
    """Why it is incomplete."""


def run_steps(
    steps: Sequence[Step], place: Place, out: Path, seconds: float, report: Callable[[Sequence[StepOutcome]], None]
) -> list[StepOutcome]:
    """Run steps one after another, at most `seconds` in all; `report` gets the outcomes so far after each."""
    outcomes, ends = list[StepOutcome](), time.monotonic() + seconds
    (out / RESULTS).mkdir(parents=True, exist_ok=True)
    for step in steps:
        left = ends - time.monotonic()
        if left < LEAST:
            outcomes.append(StepOutcome(step, "not run", note="no time was left"))
        else:
            outcomes.append(_run(step, place, out / RESULTS, min(left, step.seconds) if place.on_gpu else left))
        report(outcomes)
    return outcomes


def _run(step: Step, place: Place, folder: Path, limit: float) -> StepOutcome:
    results, log, began = folder / f"{step.name}.jsonl", folder / f"{step.name}.log", time.monotonic()
    results.unlink(missing_ok=True)
    words = [sys.executable, "-P", "-m", "meshwright.accept.step", step.name, *place.options()]
    note = ""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*words, "--results", str(results)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            note = f"ended with status {status}: {log.read_text(errors='replace')[-1500:]}" if status else ""
        except subprocess.TimeoutExpired:
            note = f"ended after its limit of {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # and whatever it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    checks = read_checks(results)
    failed = bool(note) or not checks or any(check.passed is False for check in checks)
    return StepOutcome(step, "failed" if failed else "passed", time.monotonic() - began, checks, note)
