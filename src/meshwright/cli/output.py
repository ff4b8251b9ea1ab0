"""Output of the verbs: JSON, and text that must not control the terminal. Standard library only, because `doctor` must
always run."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(value: Any) -> None:
    """`value` as one indented JSON object on standard output."""
    print(json.dumps(value, indent=2))


HIDDEN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}
"""What a terminal would do instead of showing: control characters and changes of the writing direction."""


def visible(text: str) -> str:
    """Text of a model, or of a stranger, for a terminal: what would control it is shown as a character."""
    return text.translate(HIDDEN)


@contextlib.contextmanager
def progress_on_stderr(wanted: bool) -> Iterator[None]:
    """Where `wanted`, send what is printed meanwhile, by child processes too, to standard error."""
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
