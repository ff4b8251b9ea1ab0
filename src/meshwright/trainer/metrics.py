"""Metrics: the definition of every figure that a run prints or records.

loss                     mean loss per trained token over the global batch, in nats
gnorm                    2-norm of the whole gradient, before clipping; none in the first step of an asynchronous
                         pipeline, which has no gradient yet
lr                       learning rate of the step (of AdamW's parameters)
step_time                median wall seconds of the last 20 steps, the first of the process left out (warm-up)
data_time                the part of step_time in which the first rank waited for its batch, a median in the same way
tokens_per_s_per_rank    tokens through the model per step / (step_time x ranks); padding of best-fit samples counts
trained_per_s_per_rank   the same with the tokens that carry loss
mfu                      flops_per_token x tokens_per_s_per_rank / peak; the peak and its origin are in env.json
mem                      peak memory of this rank: GPU memory reserved by PyTorch, or the process's peak RSS
expert_load              tokens of the busiest expert over the mean of its layer's experts, of the global batch, in the
                         layer where that is largest: 1 is even; null for models without experts
eta                      remaining steps x step_time, in seconds; evaluation and saving not counted
"""

import importlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.journal import read_journal

WINDOW = 20
"""Number of steps in the median of `step_time`."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of `metrics.jsonl` of kind `step`."""

    step: int
    loss: float
    gnorm: float | None
    lr: float
    tokens: int
    """Tokens seen by the model since the run began."""
    step_time: float | None
    """None at the first step of a process, which is warm-up."""
    data_time: float | None = None
    tokens_per_s_per_rank: float | None
    trained_per_s_per_rank: float | None
    mfu: float | None
    mem: int
    eta: float | None
    skipped: int
    """Steps skipped so far because loss or gradient were not finite, or outliers."""
    spikes: int
    """Outliers so far (`guards.spikes`)."""
    rewinds: int
    """How often the run went back to its last checkpoint."""
    expert_load: float | None
    """Load of the last update."""


class StepClock:
    """Measures steps; `clock` returns seconds and can be replaced in tests."""

    def __init__(
        self,
        *,
        ranks: int,
        flops_per_token: float,
        peak_flops: float | None,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ranks, self.flops_per_token, self.peak_flops, self.steps = ranks, flops_per_token, peak_flops, steps
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._wait = 0.0
        self._began = 0.0
        self._warm = False

    def begin(self) -> None:
        """Call right before a step, data loading included."""
        self._began = self._clock()

    def loaded(self) -> None:
        """Call when the step's batch is there."""
        self._wait = self._clock() - self._began

    def end(self) -> None:
        """Call when the step's work is done on the device."""
        if self._warm:
            self._seconds.append(self._clock() - self._began)
            self._waits.append(self._wait)
        self._warm = True

    def rates(self, *, step: int, tokens: int, trained: int) -> dict[str, float | None]:
        """The time-dependent figures of a step of `tokens` tokens; `trained` of them carry loss."""
        names = ("step_time", "data_time", "tokens_per_s_per_rank", "trained_per_s_per_rank", "mfu", "eta")
        if not self._seconds:
            return dict.fromkeys(names)
        seconds = statistics.median(self._seconds)
        per_rank = tokens / seconds / self.ranks
        mfu = self.flops_per_token * per_rank / self.peak_flops if self.peak_flops else None
        wait = statistics.median(self._waits)
        values = (seconds, wait, per_rank, trained / seconds / self.ranks, mfu, (self.steps - step) * seconds)
        return dict(zip(names, values, strict=True))


def new_record(kind: str, **fields: Any) -> dict[str, Any]:
    """A record of `fields` with their kind and the time of day in seconds since the epoch."""
    return {"kind": kind, "time": round(time.time(), 3), **fields}


class MetricsJournal:
    """Appends records to a JSONL file, one flushed line each. Use it in `with`.

    While the disk is full or fails, lines wait in memory: the newest ten thousand.
    """

    def __init__(self, path: Path) -> None:
        self._file = regular(path).open("a+b", buffering=0)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)  # remove an incomplete last line
        self._waiting: deque[bytes] = deque(maxlen=10_000)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        self._waiting.append((json.dumps(record) + "\n").encode())
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            line, end = self._waiting[0], self._file.seek(0, os.SEEK_END)
            try:
                if self._file.write(line) != len(line):  # the disk had space for only a part of it
                    self._file.truncate(end)
                    return
            except OSError:
                return
            self._waiting.popleft()

    def __enter__(self) -> "MetricsJournal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class History(list[dict[str, Any]]):
    """The records of a run, in the order in which they were written."""

    def of(self, kind: str) -> "History":
        """The records of one kind, such as `step` or `evaluation`."""
        return History(record for record in self if record["kind"] == kind)

    def to_pandas(self) -> Any:
        """A data frame with a row for each record; missing figures are NaN.

        Raises `UserError` if pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UserError("to_pandas needs pandas, which is not installed; pip install pandas") from error
        return pandas.DataFrame.from_records(list(self))


def stepped_since(path: Path, since: float) -> bool:
    """Whether a journal records a training step that ended after `since`, in seconds since the epoch."""
    return any(record["kind"] == "step" and record.get("time", 0) >= since for record in read_journal(path))
