"""What a verb is doing, on standard error, once it takes longer than two seconds."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.terminal import renew_line

BEFORE, TERMINAL_SECONDS, LOG_SECONDS = 2.0, 1.0, 30.0
"""Seconds before the first words, between updates on a terminal, and between lines elsewhere."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """In this context, say `what` is in progress and for how long: an updated line on a terminal, else a line now and
    then."""
    over = threading.Event()
    thread = threading.Thread(target=_say, args=(what, over), name="meshwright-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(what: str, over: threading.Event) -> None:
    began, terminal, shown = time.monotonic(), sys.stderr.isatty(), False
    pause = BEFORE
    while not over.wait(pause):
        shown, pause = True, TERMINAL_SECONDS if terminal else LOG_SECONDS
        line = f"{what} ... {time.monotonic() - began:.0f} s"
        if terminal:
            renew_line(sys.stderr, line)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    if shown and terminal:
        renew_line(sys.stderr, "")
        sys.stderr.flush()
