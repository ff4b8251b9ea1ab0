"""Text on a terminal: control characters in names, documents and model output are shown as text.

A terminal acts on escape sequences: they move its cursor, hide lines, set its title, fill the clipboard. Output to
pipes and files is unchanged.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

CLEAR = "\r\x1b[K"
"""Moves a terminal to the beginning of its line, and empties it."""

ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal: C0 and C1 control characters except tab and newline, and bidirectional
controls."""


def printable(text: str) -> str:
    """`text` with control characters escaped, as in `\\x1b[2J`."""
    return ACTS.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal(io.TextIOWrapper):
    """Standard output on a terminal, with control characters escaped."""

    def write(self, text: str, /) -> int:
        """As `TextIOWrapper.write`."""
        return super().write(printable(text))

    def renew(self, line: str) -> None:
        """Replace the terminal's last line by `line`."""
        super().write(CLEAR + printable(line))


@contextmanager
def guarded_terminal() -> Iterator[None]:
    """In this context `sys.stdout`, if it is a terminal, escapes control characters."""
    out = sys.stdout
    if not (isinstance(out, io.TextIOWrapper) and out.isatty()):
        yield
        return
    out.flush()
    terminal = Terminal(out.buffer, encoding=out.encoding, errors=out.errors, line_buffering=True)
    try:
        with redirect_stdout(terminal):
            yield
    finally:
        terminal.detach()  # flushes; the terminal stays open for who comes after


def renew_line(stream: TextIO, line: str) -> None:
    """Replace the last line of a terminal by `line`."""
    if isinstance(stream, Terminal):
        stream.renew(line)
    else:
        stream.write(CLEAR + printable(line))
