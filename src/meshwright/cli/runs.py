"""The verb `runs`: lists the runs in a folder, their state and newest figures, and what sets their recipes apart."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.output import add_json_argument, print_result, size_text
from meshwright.pages.runs import differences, find_runs, names_of, read_run, size_of

FOLDER = "runs"
WIDE, MOST_SETTINGS = 80, 8
"""Limits of a line, and of a run's settings in the list."""
DATA_ONLY = ("data.cache_dir",)
"""Settings that set no run apart."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operand and option of `runs`."""
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        type=Path,
        default=[Path(FOLDER)],
        help=f"folder of runs, or a run directory (default: {FOLDER})",
    )
    add_json_argument(parser)
    parser.epilog = "examples:\n  meshwright runs\n  meshwright runs runs/sweep --json"


def run(arguments: argparse.Namespace) -> int:
    """Print the runs, the one that began first at the top."""
    run_dirs = find_runs(arguments.folders)
    runs = [_read(run_dir, name) for run_dir, name in zip(run_dirs, names_of(run_dirs), strict=True)]
    for name, values in differences(runs):
        if name not in DATA_ONLY:
            for one, value in zip(runs, values, strict=True):
                one["differences"][name] = value
    facts = [{key: value for key, value in one.items() if key != "settings"} for one in runs]
    print_result(arguments, {"runs": facts}, _table(facts))
    return 0


def _read(run_dir: Path, name: str) -> dict[str, Any]:
    """A run's line."""
    read = read_run(run_dir, name)
    steps, held_out = read["tables"].get("step", {}), read["tables"].get("evaluation", {})
    return {
        "name": name,
        "folder": str(run_dir),
        "state": read["state"],
        "step": _last(steps.get("step", ())),
        "steps": read["steps"],
        "loss": _last(steps.get("loss", ())),
        "held_out_loss": _last(held_out.get("loss", ())),
        "tokens_per_s": _last(steps.get("tokens_per_s", ())),
        "seconds": read["elapsed"],
        "bytes": size_of(run_dir),
        "updated": read["updated"],
        "origin": read["environment"].get("origin"),
        "differences": {},
        "settings": read["settings"],
    }


def _last(values: Sequence[Any]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)


def _table(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The runs as lines of text; below each, the settings that differ between them."""
    head = ("run", "state", "step", "loss", "held out", "tok/s", "time", "size")
    rows = [head, *(_cells(one) for one in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row, one in zip(rows, [None, *runs], strict=True):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        differing = list((one or {}).get("differences", {}).items())
        yield from (shorten(f"    {name}={flow_text(value)}") for name, value in differing[:MOST_SETTINGS])
        if len(differing) > MOST_SETTINGS:
            yield f"    and {len(differing) - MOST_SETTINGS} more settings (--json)"


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    step = "-" if one["step"] is None else f"{one['step']}/{one['steps']}" if one["steps"] else str(one["step"])
    figures = ("-" if one[key] is None else f"{one[key]:.4g}" for key in ("loss", "held_out_loss"))
    speed = "-" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:.0f}"
    return (one["name"], one["state"], step, *figures, speed, _time(one["seconds"]), size_text(one["bytes"]))


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def shorten(line: str) -> str:
    """A line that fits."""
    return line if len(line) <= WIDE else f"{line[: WIDE - 3]}..."


def flow_text(value: Any) -> str:
    """A setting's value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
