"""Loss-spike detection: outliers of loss or gradient norm, as in OLMo's skip-step optimizer."""

import math
import statistics
from collections import deque

WINDOW, SIGMAS = 128, 6.0
ENOUGH = WINDOW // 2
"""Steps before the first possible spike."""


class SpikeGuard:
    """The last 128 losses and gradient norms. They are the same on every rank, and so are the verdicts.

    Outliers are recorded too: a lasting change is no spike.
    """

    def __init__(self) -> None:
        self._history: tuple[deque[float], ...] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))

    def is_spike(self, loss: float, gnorm: float) -> bool:
        """Whether one of two finite values exceeds its mean so far by more than 6 standard deviations."""
        spike = False
        for past, value in zip(self._history, (loss, gnorm), strict=True):
            if len(past) >= ENOUGH:
                spike |= value > statistics.fmean(past) + SIGMAS * statistics.pstdev(past)
            past.append(value)
        return spike

    def state(self) -> list[list[float]]:
        """The state for checkpoints."""
        return [list(past) for past in self._history]

    def load(self, state: list[list[float]]) -> None:
        """Continue from `state()`."""
        for past, values in zip(self._history, state, strict=True):
            past.clear()
            past.extend(value for value in values if math.isfinite(value))
