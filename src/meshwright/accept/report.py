"""The report on a machine: text, JSON, and one HTML page that needs no other file."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from meshwright.accept.run import StepOutcome
from meshwright.machine import find_machine, run_program
from meshwright.pages.shell import header, page, section, table
from meshwright.storage.durable import write_durably
from meshwright.version import __version__

MARKS = {True: "ok", False: "FAILED", None: "-"}
TITLE = "Meshwright on this machine"


def machine_facts(device: str) -> dict[str, str]:
    """The machine, the software and the moment."""
    machine = find_machine(device)
    driver = run_program(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
    commit = run_program(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]) or ""
    facts = {
        "devices": f"{machine.devices} x {machine.name}, {machine.memory_bytes / 2**30:.0f} GiB",
        "driver": next(iter(driver.splitlines()), ""),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "meshwright": __version__,
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }
    return {name: value for name, value in facts.items() if value}


def write_report(outcomes: Sequence[StepOutcome], facts: Mapping[str, str], out: Path) -> None:
    """Write report.txt, report.json and report.html."""
    write_durably(out / "report.json", json.dumps(as_data(outcomes, facts), indent=1) + "\n")
    write_durably(out / "report.txt", as_text(outcomes, facts, details=True) + "\n")
    write_durably(out / "report.html", as_page(outcomes, facts))


def as_text(outcomes: Sequence[StepOutcome], facts: Mapping[str, str], *, details: bool) -> str:
    """A line for each step; `details`: with all its checks, else with those that failed."""
    lines = [f"{name:<11}{value}" for name, value in facts.items()] + [""]
    for outcome in outcomes:
        lines += step_lines(outcome, details=details)
    return "\n".join([*lines, "", summary(outcomes)])


def step_lines(outcome: StepOutcome, *, details: bool = False) -> list[str]:
    """A step's line, and those of its checks."""
    good = sum(check.passed is True for check in outcome.checks)
    tried = sum(check.passed is not None for check in outcome.checks)
    lines = [f"{outcome.step.name:<12}{outcome.state:<8} {outcome.seconds:5.0f} s  {good} of {tried} checks passed"]
    lines += [f"    {outcome.note}"] if outcome.note else []
    for check in outcome.checks:
        if details or check.passed is False:
            lines.append(f"    {MARKS[check.passed]:<7}{check.name}: {check.detail}")
    return lines


def summary(outcomes: Sequence[StepOutcome]) -> str:
    """The verdict."""
    failed = [outcome.step.name for outcome in outcomes if outcome.state == "failed"]
    missing = [outcome.step.name for outcome in outcomes if outcome.state == "not run"]
    parts = [f"failed: {', '.join(failed)}"] if failed else ["every step that ran has passed"]
    return "; ".join([*parts, *([f"not run: {', '.join(missing)}"] if missing else [])])


def as_page(outcomes: Sequence[StepOutcome], facts: Mapping[str, str]) -> str:
    """The report as a page."""
    body = [header(TITLE, escape(summary(outcomes))), section("The machine", table((), facts.items()))]
    for outcome in outcomes:
        note = [f'<pre class="failed">{escape(outcome.note)}</pre>'] if outcome.note else []
        rows = [(MARKS[check.passed], check.name, check.detail) for check in outcome.checks]
        title = f"{outcome.step.name}: {outcome.state}, {outcome.seconds:.0f} s"
        body.append(section(title, *note, table((), rows), about=escape(outcome.step.about)))
    return page(TITLE, body)


def as_data(outcomes: Sequence[StepOutcome], facts: Mapping[str, str]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"machine": dict(facts), "steps": [asdict(outcome) for outcome in outcomes]}
