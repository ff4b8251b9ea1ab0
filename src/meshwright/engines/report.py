"""A comparison as data, as Markdown and for the terminal."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.engines.compare import Contestant, ContestRow, Pace

PACKAGES = (
    *("torch", "transformers", "accelerate", "lightning-fabric", "lightning"),
    *("deepspeed", "megatron-core", "litgpt", "peft", "trl"),
)
_READ_VERSIONS = """\
import importlib.metadata, json, sys
installed = {}
for name in sys.argv[1:]:
    try:
        installed[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(installed))
"""
SAME = """\
Every engine trained the same tokens in the same order, from the same weights, with the same optimizer and schedule."""
ABOUT = """\
The engines alternated on one machine. x: tokens per second relative to {first}, median of all timed steps; rounds: the
lowest and highest ratio of single rounds. Differences: the largest of all steps, relative to {first}. Memory: the peak
of one process. First step: from starting the processes to the end of the first step. Lines: program and configuration
files."""


def reference(rows: Sequence[ContestRow]) -> ContestRow:
    """The row that others are compared with: the first measured one."""
    return next((row for row in rows if row.error is None), rows[0])


def as_json(rows: Sequence[ContestRow]) -> dict[str, Any]:
    """The output of `--json`."""
    first = reference(rows)
    return {
        "engines": [
            {
                "name": row.name,
                "ratio": ratio[0] if (ratio := row.ratio_to(first)) else None,
                "tokens_per_second": row.tokens_per_second,
                "peak_bytes": None if row.error else row.peak_bytes,
                "max_loss_difference": row.difference_from(first),
                "error": row.error,
            }
            for row in rows
        ]
    }


def as_data(rows: Sequence[ContestRow], about: dict[str, str]) -> dict[str, Any]:
    """The same with all measurements and the machine."""
    data, first = as_json(rows), reference(rows)
    for entry, row in zip(data["engines"], rows, strict=True):
        ratio = row.ratio_to(first)
        entry |= {
            "engine": row.engine,
            "strategy": row.strategy,
            "ratio_of_rounds": None if ratio is None else ratio[1:],
            "first_step_seconds": row.first_step,
            "max_gnorm_difference": row.difference_from(first, "gnorms"),
            "lines": row.translation.lines if row.translation else None,
            "left_out": {setting.path: setting.reason for setting in row.translation.left_out}
            if row.translation
            else {},
            "what_ran": row.ran,
            "seconds": row.turns,
            "losses": row.losses,
            "gnorms": row.gnorms,
        }
    return {**about, **data}


def describe(pace: Pace, command: str, contestants: Sequence[Contestant] = ()) -> dict[str, str]:
    """Where, when and how a comparison was made; also the versions that contestants with a Python of their own have."""
    names = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else platform.machine()
    return {
        "compared": compared(contestants),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the end",
        "versions": _versions({one.engine.name: one.python for one in contestants}),
        "steps": f"{pace.rounds} rounds of {pace.turn} steps, after {pace.warm_up} of warm-up",
    }


def compared(contestants: Sequence[Contestant]) -> str:
    """A sentence that names the settings, other than layouts, in which the recipes differ."""
    runs = [contestant.resolved.run.model_dump(exclude={"layout", "run_dir"}) for contestant in contestants]
    settings = {
        f"{section}.{name}": [run[section][name] for run in runs]
        for section, fields in (runs[0] if runs else {}).items()
        if all(isinstance(run[section], dict) for run in runs)
        for name in fields
    } | {section: [run[section] for run in runs] for section in (runs[0] if runs else {})}
    differing = [name for name, values in settings.items() if any(value != values[0] for value in values)]
    named = [name for name in differing if not any(other.startswith(f"{name}.") for other in differing)]
    if not named:
        return SAME
    return f"The recipes differ in {', '.join(named)}; ratios and differences include the effect of these settings."


def introduction(rows: Sequence[ContestRow], about: Mapping[str, str]) -> str:
    """The common settings of the rows, and the meaning of the columns."""
    return f"{about.get('compared', SAME)}\n{ABOUT.format(first=reference(rows).name)}"


def made(about: Mapping[str, str]) -> dict[str, str]:
    """The date, machine, command and versions of a comparison, without the introduction's sentence."""
    return {key: value for key, value in about.items() if key != "compared"}


def table(rows: Sequence[ContestRow]) -> list[list[str]]:
    """Header and rows of the table; an engine that was not measured has only its name."""
    head = ["engine", "tokens/s", "x", "rounds", "peak GiB", "first step s", "loss differs", "norm differs", "lines"]
    return [head, *(_cells(row, reference(rows)) for row in rows)]


def _cells(row: ContestRow, first: ContestRow) -> list[str]:
    lines = "" if row.translation is None else str(row.translation.lines)
    if row.error or row.tokens_per_second is None:
        return [row.name, "-", "", "", "", "", "", "", lines]
    ratio = row.ratio_to(first)
    loss, norm = row.difference_from(first), row.difference_from(first, "gnorms")
    return [
        row.name,
        f"{row.tokens_per_second:.0f}",
        f"{ratio[0]:.2f}" if ratio else "",
        f"{ratio[1]:.2f}-{ratio[2]:.2f}" if ratio else "",
        f"{(row.peak_bytes or 0) / 2**30:.2f}",
        f"{row.first_step:.1f}" if row.first_step is not None else "",
        f"{loss:.1e}" if loss is not None else "",
        f"{norm:.1e}" if norm is not None else "",
        lines,
    ]


def text(rows: Sequence[ContestRow]) -> str:
    """The table for a terminal, and the reasons why engines have no figures."""
    cells = table(rows)
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, *(f"{row.name}: {row.error}" for row in rows if row.error)])


def markdown(rows: Sequence[ContestRow], about: dict[str, str]) -> str:
    """The page `compare.md`."""
    head, *body = table(rows)
    parts = ["# Engines side by side\n", introduction(rows, about), ""]
    parts += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    parts += [f"| {' | '.join(cells)} |" for cells in body]
    parts.append("")
    parts += [f"- **{row.name}**: {row.error}" for row in rows if row.error]
    if not all(row.error for row in rows):
        parts += ["", "What ran, read back from the programs' objects:", ""]
        parts += [f"- **{row.name}**: {ran(row)}" for row in rows if row.ran]
        parts += ["", "Settings that a program leaves out, without effect on training:", ""]
        parts += [f"- **{row.name}**: {missing}" for row in rows if (missing := left_out(row))] or ["- nothing"]
        parts += ["", "Losses of each step:", "", _losses(rows)]
    return "\n".join([*parts, "", *(f"- {key}: {value}" for key, value in made(about).items()), ""])


def ran(row: ContestRow) -> str:
    """An engine's report of itself, in a line."""
    report = row.ran
    return (
        f"{report['world_size']} ranks, {' in '.join(reversed(report['wrappers']))} of {'/'.join(report['parameter'])} "
        f"in {'/'.join(report['dtype'])}; a rank holds {report['held']} of {report['parameters']} parameters and "
        f"{report['state']} of each moment; {report['optimizer']}"
    )


def left_out(row: ContestRow) -> str:
    """The settings that its program leaves out, in a line."""
    settings = row.translation.left_out if row.translation else []
    return "; ".join(f"{setting.path}={setting.shown} ({setting.reason})" for setting in settings)


def _losses(rows: Sequence[ContestRow]) -> str:
    measured = [row for row in rows if row.losses and not row.error]
    lines = [f"| step | {' | '.join(row.name for row in measured)} |", "|---" * (len(measured) + 1) + "|"]
    steps = zip(*(row.losses for row in measured), strict=False)
    lines += [f"| {number} | {' | '.join(f'{loss:.6f}' for loss in step)} |" for number, step in enumerate(steps, 1)]
    return "\n".join(lines)


def _versions(pythons: Mapping[str, Path]) -> str:
    here = versions_of(Path(sys.executable))
    shown = [", ".join(f"{name} {version}" for name, version in here.items())]
    for engine, python in pythons.items():
        there = {} if python == Path(sys.executable) else versions_of(python)
        other = [f"{name} {version}" for name, version in there.items() if version != here.get(name)]
        shown += [f"{engine} with {', '.join(other)}"] if other else []
    return "; ".join(shown)


def versions_of(python: Path) -> dict[str, str]:
    """The versions of the engines' packages that a Python has; empty if it does not run."""
    words = [python, "-P", "-c", _READ_VERSIONS, *PACKAGES]
    try:
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError):
        return {}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
