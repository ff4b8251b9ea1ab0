"""Trackers: callbacks that copy every record of `metrics.jsonl` somewhere else, from the first rank."""

import contextlib

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.spec.run import Run


class Tracker(Callback):
    """A copy of the metrics somewhere else: override `open` and `write`. Only the first rank's is ever opened.

    A disk that is full (`OSError`) is no reason to stop training: the record is then left out.
    """

    _opened = False

    def open(self, run: Run) -> None:
        """Before the first record."""

    def write(self, record: Record) -> None:
        """Copy one record."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last record."""

    def on_record(self, training: Training, record: Record) -> None:
        """See `Callback`."""
        if not self._opened:
            self.open(training.run)
            self._opened = True
        with contextlib.suppress(OSError):
            self.write(record)

    def on_stop(self, training: Training, record: Record) -> None:
        """See `Callback`."""
        if self._opened:
            self.close()
            self._opened = False


def numbers_of(record: Record) -> dict[str, float]:
    """The figures of a record under their names; `step` and `time` are left out."""
    return {
        name: value for name, value in record.items() if name not in ("step", "time") and isinstance(value, int | float)
    }
