"""Early stopping: a run ends when a figure has not improved for several records."""

import math
from typing import Any, Literal

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.callbacks.tracker import numbers_of
from meshwright.spec.errors import UserError


class EarlyStopping(Callback):
    """Stops the run when `monitor` has not improved on its best value `patience` records in a row.

    The run ends as after its last step: it evaluates, saves and prints the reason. The count survives a resume.
    """

    def __init__(
        self,
        monitor: str = "evaluation/loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """
        Args:
            monitor: a figure of `metrics.jsonl` as `KIND/NAME`: `evaluation/loss`, `step/gnorm`, `ema/loss`.
            patience: records of that kind without improvement before the run ends.
            min_delta: smallest change that counts as an improvement.
            mode: `min` if smaller is better, `max` if larger is.
        """
        if "/" not in monitor.strip("/"):
            raise UserError(
                f"EarlyStopping: monitor={monitor!r} must be KIND/NAME, as in evaluation/loss or step/gnorm"
            )
        if not isinstance(patience, int) or patience < 1:
            raise UserError(f"EarlyStopping: patience={patience!r} must be a whole number, at least 1")
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise UserError(f"EarlyStopping: min_delta={min_delta!r} must be a number, at least 0")
        if mode not in ("min", "max"):
            raise UserError(f"EarlyStopping: mode={mode!r} must be min or max")
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self.best: float | None = None
        """The best value so far."""
        self.best_step = 0
        self.since = 0
        """Records since the best one."""

    def on_start(self, training: Training) -> None:
        """Refuse a monitor that is never recorded; a new run has no best value yet."""
        if not training.step:
            self.best, self.best_step, self.since = None, 0, 0
        run = training.run
        evaluates = run.data.held_out and run.training.evaluation.batches and run.training.evaluation.every
        if self.monitor.startswith(("evaluation/", "ema/")) and not evaluates:
            raise UserError(
                f"EarlyStopping monitors {self.monitor}, which needs held-out text; set training.evaluation.every "
                "and data.held_out, or monitor another value, such as step/loss"
            )

    def on_record(self, training: Training, record: Record) -> None:
        """Look at the figure; on the first rank, which asks for all."""
        kind, _, name = self.monitor.partition("/")
        if record["kind"] != kind:
            return
        if name not in record:
            there = ", ".join(f"{kind}/{key}" for key in numbers_of(record))
            raise UserError(f"EarlyStopping: records of kind {kind} have no value {name!r}; they have {there}")
        self._count(record[name], record["step"])
        if self.since >= self.patience:
            best = "never was a number" if self.best is None else f"was best at step {self.best_step} ({self.best:.6g})"
            by = f" by {self.min_delta:g}" * bool(self.min_delta)
            training.stop(f"{self.monitor} {best} and has not improved{by} in {self.since} records since")

    def _count(self, value: float | None, step: int) -> None:
        sign = 1 if self.mode == "min" else -1
        if value is None or math.isnan(value):
            self.since += 1
        elif self.best is None or sign * value < sign * self.best - self.min_delta:
            self.best, self.best_step, self.since = value, step, 0
        else:
            self.since += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.since = state["best"], state["best_step"], state["since"]
