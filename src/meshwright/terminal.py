"""Text on a terminal: control characters in names, documents and model output are shown as text.

A terminal acts on escape sequences: they move its cursor, hide lines, set its title, fill the clipboard. Output to
pipes and files is unchanged.
"""

import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

CLEAR = "\r\x1b[K"
"""Moves a terminal to the beginning of its line, and empties it."""

USUAL_COLUMNS = 80
COMMAND = re.compile(r"(\w+ +| +)?(meshwright|torchrun|pip) [a-z-]")
"""A line that a shell takes, perhaps below a label."""
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
"""Between columns of a line."""
ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal: C0 and C1 control characters except tab and newline, and bidirectional
controls."""


def printable(text: str) -> str:
    """`text` with control characters escaped, as in `\\x1b[2J`."""
    return ACTS.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal(io.TextIOWrapper):
    """Standard output on a terminal, with control characters escaped and lines folded at words."""

    folds, _begun = True, False

    def write(self, text: str, /) -> int:
        """As `TextIOWrapper.write`. Lines that are written in parts are not folded."""
        text = printable(text)
        if self.folds:
            first, *others = text.split("\n")
            others = ["\n".join(folded(line, columns(self))) for line in others]
            first = first if self._begun else "\n".join(folded(first, columns(self)))
            self._begun, text = not text.endswith("\n"), "\n".join((first, *others))
        return super().write(text)

    def renew(self, line: str) -> None:
        """Replace the terminal's last line by `line`."""
        super().write(CLEAR + printable(line))
        self._begun = bool(line)


@contextmanager
def guarded_terminal(*, folds: bool = True) -> Iterator[None]:
    """In this context `sys.stdout`, if it is a terminal, escapes control characters and folds lines."""
    out = sys.stdout
    if not (isinstance(out, io.TextIOWrapper) and out.isatty()):
        yield
        return
    out.flush()
    # A descriptor that was a file before keeps a buffer that would seek.
    raw = open(out.fileno(), "wb", closefd=False)  # noqa: SIM115  (the terminal stays open)
    terminal = Terminal(raw, encoding=out.encoding, errors=out.errors, line_buffering=True)
    terminal.folds = folds
    try:
        with redirect_stdout(terminal):
            yield
    finally:
        terminal.detach()  # flushes; the terminal stays open for who comes after


def columns(stream: TextIO) -> int | None:
    """The width of a terminal; None for a pipe or a file."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS) if stream.isatty() else None
    except (OSError, ValueError):  # a terminal that has no size, or a stream without a descriptor
        return USUAL_COLUMNS if stream.isatty() else None


def folded(line: str, width: int | None) -> list[str]:
    """A line as lines of at most `width` characters; words and commands stay whole. Later lines begin below the last
    column of text that begins in the left half."""
    if width is None or len(line) <= width or COMMAND.match(line):
        return [line]
    starts = [match.end() for match in GAP.finditer(line) if match.end() <= width // 2]
    indent = starts[-1] if starts else 2 + len(line) - len(line.lstrip())
    wrapped = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return wrapped or [line]


def renew_line(stream: TextIO, line: str) -> None:
    """Replace the last line of a terminal by `line`, without its last parts if it is narrower: a line that the terminal
    breaks could not be replaced."""
    width = (columns(stream) or USUAL_COLUMNS) - 1
    while len(line) > width:
        line = line.rpartition("  ")[0].rstrip() or line[:width]
    if isinstance(stream, Terminal):
        stream.renew(line)
    else:
        stream.write(CLEAR + printable(line))
