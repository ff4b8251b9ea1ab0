"""Display: a run's metrics as lines for people, or as a bar if a Jupyter kernel runs this process."""

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
from typing import Any, TextIO

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.terminal import columns, renew_line
from meshwright.trainer.metrics import StepRecord

BAR = 20
"""Width of a run's progress, in characters."""
LESS, WIDE = ("lr ", "gnorm ", "mfu ", "mem "), 200
"""Figures that a narrow terminal's status leaves out, the first ones first; the width of a terminal without one."""
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 30.0
"""Intervals between updates on a terminal, and between lines elsewhere."""
RENEW_SECONDS, FOLLOW_SECONDS = 0.2, 0.5
"""Intervals between updates of a notebook's bar, and between reads of the workers' journal."""


class ProgressLine:
    """Progress, speed and time left on standard error: an updating line on a terminal, else occasional lines.

    Used in `with`, it clears the terminal's line afterwards, even after an error.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._what, self._first, self._began = "", 0, 0.0
        self._shown = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the task and its progress if the interval has passed."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._began = what, done, now
        if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._shown = now
            speed = (done - self._first) / max(now - self._began, 1e-9)
            left = f", {duration((total - done) / speed)} left" if speed else ""
            line = f"{what}: {100 * done // max(1, total)} % of {short(total)}, {short(speed)}/s{left}"
            if self._terminal:
                renew_line(sys.stderr, line)
            else:
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            renew_line(sys.stderr, "")
            sys.stderr.flush()


class Display(Callback):
    """An updating line on a terminal, a bar in a notebook, plain lines at intervals elsewhere; only on rank 0."""

    def __init__(
        self,
        *,
        steps: int,
        memory_bytes: int,
        device: str,
        enabled: bool,
        stream: TextIO | None = None,
        pressure: Callable[[], str] = str,
    ) -> None:
        """`pressure`: a remark about the machine's memory, if any."""
        self.pressure = pressure
        self.shows_steps = True
        """False where the parent's notebook shows them."""
        self.steps, self.memory_bytes, self.enabled = steps, memory_bytes, enabled
        self.per_rank = "tok/s/rank" if device == "cpu" else "tok/s/gpu"
        self.stream = stream or sys.stdout
        self.live = enabled and self.stream.isatty()
        self.bar = notebook_bar(steps) if enabled else None
        self._every = max(1, steps // 50)
        self._open_line = False

    def say(self, text: str) -> None:
        """Print `text` on separate lines."""
        if not self.enabled:
            return
        if self._open_line:
            self.stream.write("\n")
            self._open_line = False
        print(text, file=self.stream, flush=True)

    def step(self, record: StepRecord) -> None:
        """Show a step: always on a terminal, about fifty times a run elsewhere."""
        if self.live:
            renew_line(self.stream, self._status(record))
            self.stream.flush()
            self._open_line = True
        elif record.step in (1, self.steps) or record.step % self._every == 0:
            self.say(self.line(record))

    def on_record(self, training: Training, record: Record) -> None:
        """Show steps; other records are printed by their writers."""
        if record["kind"] == "step" and self.bar is not None:
            self.bar.show(record)
        elif record["kind"] == "step" and self.shows_steps:
            self.step(StepRecord(**{key: value for key, value in record.items() if key not in ("kind", "time")}))

    def _status(self, record: StepRecord) -> str:
        """The line with a bar; on a narrow terminal without the bar, then without figures that matter less."""
        width, line = columns(self.stream) or WIDE, self.line(record)
        if len(line) + BAR + 3 < width:
            return _bar(record.step, self.steps) + line
        parts = line.split("  ")
        for name in LESS:
            if len("  ".join(parts)) < width:
                break
            parts = [part for part in parts if not part.startswith(name)]
        return "  ".join(parts)

    def line(self, record: StepRecord) -> str:
        """`step 120/1000  loss 2.341  gnorm 0.83  lr 2.9e-04  7.1k tok/s/gpu  mfu 41%  mem 61.2/80G  eta 1h12m`."""
        parts = [
            f"step {record.step}/{self.steps}",
            f"loss {record.loss:.3f}",
            "gnorm none yet" if record.gnorm is None else f"gnorm {record.gnorm:.2f}",
            f"lr {record.lr:.1e}",
        ]
        if record.tokens_per_s_per_rank is not None:
            parts.append(f"{short(record.tokens_per_s_per_rank)} {self.per_rank}")
        if record.mfu is not None:
            parts.append(f"mfu {100 * record.mfu:.0f}%")
        parts.append(f"mem {record.mem / 2**30:.1f}/{self.memory_bytes / 2**30:.0f}G")
        if full := self.pressure():
            parts.append(full)
        if record.eta is not None:
            parts.append(f"eta {duration(record.eta)}")
        for name in ("skipped", "spikes", "rewinds"):
            if getattr(record, name):
                parts.append(f"{name} {getattr(record, name)}")
        return "  ".join(parts)


def short(number: float) -> str:
    """1234567 as `1.2M`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def model_size(parameters: int, adapters: int, trained: int) -> str:
    """`1.2B parameters and 11.3M of adapters, 0.9 % trained`; `parameters` counts the model without adapters."""
    everything = parameters + adapters
    share = "all" if trained == everything else f"{100 * trained / everything:.2g} %"
    beside = f" and {short(adapters)} of adapters" if adapters else ""
    return f"{short(parameters)} parameters{beside}, {share} trained"


def duration(seconds: float) -> str:
    """4320 as `1h12m`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _bar(step: int, steps: int) -> str:
    return f"[{'=' * round(BAR * step / steps):<{BAR}}] "


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
def following(journal: Path, steps: int) -> Iterator[bool]:
    """In this context a notebook shows the steps that worker processes append to `journal`. Yields whether there is a
    notebook."""
    bar = notebook_bar(steps)
    if bar is None:
        yield False
        return
    over = threading.Event()
    begin = journal.stat().st_size if journal.exists() else 0
    thread = threading.Thread(target=_follow, args=(journal, begin, bar, over), name="meshwright-bar", daemon=True)
    thread.start()
    try:
        yield True
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
