"""The verb `runs`: lists the runs in a folder, their state and newest figures, and what sets their recipes apart."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.output import add_json_argument, print_result, size_text
from meshwright.pages.listing import FOLDER, list_runs

WIDE, MOST_SETTINGS = 80, 8
"""Limits of a line, and of a run's settings in the list."""


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
    facts = list_runs(arguments.folders)
    print_result(arguments, {"runs": facts}, _table(facts))
    return 0


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
