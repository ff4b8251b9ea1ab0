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

import meshwright
from meshwright.accept.run import StepOutcome
from meshwright.plan.machine import find_machine, run_program
from meshwright.storage.durable import write_durably

MARKS = {True: "ok", False: "FAILED", None: "-"}
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Meshwright on this machine</title>
<style>:root{color-scheme:light dark}body{font:15px system-ui,sans-serif;margin:1em auto;max-width:60em;padding:0 .7em}
table{border-collapse:collapse;width:100%;margin:.3em 0 1.2em}td,th{padding:.25em .6em .25em 0;text-align:left;
vertical-align:top;border-bottom:1px solid #8884}h2{font-size:1.05em;margin:1.2em 0 .2em}td:last-child{width:55%}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font:inherit}.failed{color:#c22;font-weight:600}
@media(max-width:500px){td:last-child{width:auto}body{font-size:13px}}</style></head><body>"""


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
        "meshwright": meshwright.__version__,
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
    parts = [HEAD, "<h1>Meshwright on this machine</h1><table>"]
    parts += [f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()]
    parts.append(f"</table><p>{escape(summary(outcomes))}</p>")
    for outcome in outcomes:
        kind = ' class="failed"' if outcome.state == "failed" else ""
        parts.append(
            f"<h2>{escape(outcome.step.name)}: <span{kind}>{outcome.state}</span>, {outcome.seconds:.0f} s</h2>"
        )
        parts.append(f"<p>{escape(outcome.step.about)}</p>")
        parts += [f'<pre class="failed">{escape(outcome.note)}</pre>'] if outcome.note else []
        parts.append("<table>")
        parts += [_row(check.passed, check.name, check.detail) for check in outcome.checks]
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>\n"])


def _row(passed: bool | None, name: str, detail: str) -> str:
    kind = ' class="failed"' if passed is False else ""
    return f"<tr><td{kind}>{MARKS[passed]}</td><td>{escape(name)}</td><td><pre>{escape(detail)}</pre></td></tr>"


def as_data(outcomes: Sequence[StepOutcome], facts: Mapping[str, str]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"machine": dict(facts), "steps": [asdict(outcome) for outcome in outcomes]}
