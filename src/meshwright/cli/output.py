"""JSON output of the verbs. Standard library only, because `doctor` must always run."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


class Printed:
    """What this process has printed."""

    objects = 0
    """Number of JSON objects, so that an error after one does not print another."""


def print_json(value: Any) -> None:
    """Print `value` as one indented JSON object."""
    print(json.dumps(value, indent=2), flush=True)
    Printed.objects += 1


def print_json_error(words: str, status: int) -> None:
    """Print an error as the JSON object that `--json` promises."""
    print_json({"error": words, "status": status})


def print_result(arguments: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    """Print `value` as JSON with `--json`, else the lines of text."""
    if arguments.json:
        print_json(value)
    else:
        for line in lines:
            print(line)


@contextlib.contextmanager
def progress_on_stderr(wanted: bool) -> Iterator[None]:
    """If `wanted`, redirect standard output, of child processes too, to standard error."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def size_text(size: int) -> str:
    """A size in a readable unit: `12.6 GiB`, `0.432 GiB`, `51.2 MiB`, `3.4 KiB`, `24 B`."""
    if size < 100:
        return f"{size} B"
    unit, number = next((unit, size / one) for unit, one in UNITS.items() if size >= one / 10)
    return f"{number:.3f} {unit}" if unit == "GiB" and number < 10 else f"{number:.1f} {unit}"
