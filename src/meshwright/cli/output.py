"""The one place that says how verbs print for machines; standard library only, for `doctor` always runs."""

import argparse
import json
from typing import Any


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(value: Any) -> None:
    """`value` as one indented JSON object on standard output."""
    print(json.dumps(value, indent=2))
