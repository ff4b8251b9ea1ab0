"""Text on a terminal: control characters in names, documents and what models say are shown, never obeyed.

A terminal acts on escape sequences: they move its cursor, hide lines, set its title, fill the clipboard. What is piped
or written to a file stays as it is.
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
"""What acts on a terminal: C0 and C1 control characters but tab and newline, and changes of writing direction."""


def printable(text: str) -> str:
    """`text` with what would act on a terminal written out, as in `\\x1b[2J`."""
    return ACTS.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal(io.TextIOWrapper):
    """Standard output that a person reads: it shows what would act on the terminal."""

    def write(self, text: str, /) -> int:
        """As `TextIOWrapper.write`."""
        return super().write(printable(text))

    def renew(self, line: str) -> None:
        """Put `line` in the place of what stands in the terminal's last line."""
        super().write(CLEAR + printable(line))


@contextmanager
def guarded_terminal() -> Iterator[None]:
    """While it lasts, `sys.stdout` shows what would act on it, where it is a terminal."""
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
    """Put `line` in the place of what stands in the last line of a terminal."""
    if isinstance(stream, Terminal):
        stream.renew(line)
    else:
        stream.write(CLEAR + printable(line))
