"""Progress in a notebook: an updating bar, if a Jupyter kernel runs this process."""

import contextlib
import html
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.callbacks.callback import Record

RENEW_SECONDS, FOLLOW_SECONDS = 0.2, 0.5
"""Intervals between updates of the bar, and between reads of the workers' journal."""


class NotebookBar:
    """A bar of a run's steps, below the cell that trains."""

    def __init__(self, display: Callable[..., Any], steps: int) -> None:
        """`display`: IPython's."""
        self.steps = steps
        self._display, self._handle = display, None
        self._shown = 0.0

    def show(self, record: Record) -> None:
        """Show a record of kind `step`, unless another was just shown and more will follow."""
        now, step = time.monotonic(), record["step"]
        if now - self._shown < RENEW_SECONDS and step < self.steps:
            return
        self._shown = now
        line = f"step {step}/{self.steps}  loss {record['loss']:.4f}  lr {record['lr']:.1e}"
        if record.get("eta") is not None:
            line += f"  {record['eta']:.0f} s left"
        page = f'<progress value="{step}" max="{self.steps}"></progress> <code>{html.escape(line)}</code>'
        bundle = {"text/plain": line, "text/html": page}
        with contextlib.suppress(Exception):  # a closed notebook must not stop training
            if self._handle is None:
                self._handle = self._display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


def notebook_bar(steps: int) -> NotebookBar | None:
    """A bar if this process is a notebook's kernel, else None. Never loads IPython: a kernel has it loaded already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:  # a terminal's shell has none
        return None
    return NotebookBar(importlib.import_module("IPython.display").display, steps)


@contextmanager
def following(journal: Path, steps: int) -> Iterator[None]:
    """In this context a notebook shows the steps that worker processes append to `journal`."""
    bar = notebook_bar(steps)
    if bar is None:
        yield
        return
    over = threading.Event()
    begin = journal.stat().st_size if journal.exists() else 0
    thread = threading.Thread(target=_follow, args=(journal, begin, bar, over), name="meshwright-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(journal: Path, place: int, bar: NotebookBar, over: threading.Event) -> None:
    last = False
    while not last:
        last = over.wait(FOLLOW_SECONDS)  # once more at the end, for the last records
        with contextlib.suppress(OSError, ValueError), journal.open("rb") as file:
            file.seek(place)
            lines = file.read().rpartition(b"\n")[0].splitlines(keepends=True)
            place += sum(map(len, lines)) + bool(lines)
            steps = [record for line in lines if (record := json.loads(line))["kind"] == "step"]
            if steps:
                bar.show(steps[-1])
