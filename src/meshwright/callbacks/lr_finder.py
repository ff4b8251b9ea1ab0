"""The learning-rate finder: a sweep of rates before the first step, after which the run starts as if without it."""

import math
from typing import Any

from meshwright.callbacks.callback import Callback, Training
from meshwright.spec.errors import UserError


class LRFinder(Callback):
    """Makes trial steps with an exponentially growing learning rate and suggests one: the rate at which the smoothed
    loss falls most steeply over the logarithm of the rate (Smith, "Cyclical Learning Rates for Training Neural
    Networks", 2017, section 3.3; the steepest descent is fastai's reading).

    The sweep ends when the loss diverges. Weights, optimizer, data and random state are then restored, so the run
    continues as if there had been no sweep, with its recipe's schedule; for the sweep alone, set `training.steps=1`.
    The sweep needs memory for a copy of weights and optimizer state. A resumed run does not sweep again.
    """

    def __init__(
        self, start: float = 1e-6, end: float = 1.0, *, steps: int = 100, diverged: float = 4.0, smoothing: float = 0.9
    ) -> None:
        """
        Args:
            start, end: the first and the last learning rate.
            steps: how many there are.
            diverged: the sweep ends when the smoothed loss is this many times its least so far.
            smoothing: of the loss's moving average, in [0, 1).
        """
        if not (isinstance(start, int | float) and isinstance(end, int | float) and 0 < start < end < math.inf):
            raise UserError(f"LRFinder: start={start!r} and end={end!r} must be numbers, 0 < start < end")
        if not isinstance(steps, int) or steps < 3:
            raise UserError(f"LRFinder: steps={steps!r} must be a whole number, at least 3")
        if not isinstance(diverged, int | float) or diverged <= 1:
            raise UserError(f"LRFinder: diverged={diverged!r} must be a number above 1")
        if not isinstance(smoothing, int | float) or not 0 <= smoothing < 1:
            raise UserError(f"LRFinder: smoothing={smoothing!r} must be a number in [0, 1)")
        self.start, self.end, self.steps, self.diverged, self.smoothing = start, end, steps, diverged, smoothing
        self.curve: list[dict[str, Any]] = []
        """`lr`, `loss`, `smoothed` of each step of the sweep."""
        self.suggestion: float | None = None
        """The learning rate; None if the loss never fell."""

    def on_start(self, training: Training) -> None:
        """Sweep."""
        if training.step:
            return
        training.say(f"learning-rate finder: {self.steps} steps from {self.start:g} to {self.end:g}, undone afterwards")
        self.curve = self._sweep(training)
        for point in self.curve:
            training.log("lr_finder", **point)
        self.suggestion = steepest(self.curve)
        training.log("lr_suggestion", lr=self.suggestion)
        training.say(self._outcome(training.run.training.optimizer.lr))

    def _sweep(self, training: Training) -> list[dict[str, Any]]:
        curve: list[dict[str, Any]] = []
        average, least = 0.0, math.inf
        with training.trial_steps() as step:
            for index in range(self.steps):
                lr = self.start * (self.end / self.start) ** (index / (self.steps - 1))
                loss = step(index, lr)
                if loss is None or not math.isfinite(loss):
                    break
                average = self.smoothing * average + (1 - self.smoothing) * loss
                smoothed = average / (1 - self.smoothing ** (index + 1))
                curve.append({"lr": lr, "loss": loss, "smoothed": smoothed})
                least = min(least, smoothed)
                if smoothed > self.diverged * least:
                    break
        return curve

    def _outcome(self, ours: float) -> str:
        last = f"{len(self.curve)} steps, up to {self.curve[-1]['lr']:.1e}" if self.curve else "no step was finite"
        if self.suggestion is None:
            return f"learning-rate finder ({last}): the loss never fell; widen start and end, or use more steps"
        return (
            f"learning-rate finder ({last}): the loss falls most steeply at training.optimizer.lr="
            f"{self.suggestion:.1e}; this run trains with its recipe's {ours:.1e}"
        )


def steepest(curve: list[dict[str, Any]]) -> float | None:
    """The rate at which the smoothed loss falls most steeply over log(rate), by central differences, before its least
    value; None if it never falls."""
    losses = [point["smoothed"] for point in curve]
    falls = [
        ((losses[i + 1] - losses[i - 1]) / math.log(curve[i + 1]["lr"] / curve[i - 1]["lr"]), curve[i]["lr"])
        for i in range(1, len(curve) - 1)
    ]
    slope, lr = min(falls, default=(0.0, 0.0))
    return lr if slope < 0 else None
