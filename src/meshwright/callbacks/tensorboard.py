"""The tracker `tensorboard`: every figure as a scalar, in `tensorboard/` of the run directory."""

import importlib

from meshwright.callbacks.callback import Record
from meshwright.callbacks.tracker import Tracker, numbers_of
from meshwright.spec.run import Run


class TensorBoard(Tracker):
    """Writes event files with torch's own writer."""

    def open(self, run: Run) -> None:
        """See `Tracker`."""
        folder = f"{run.run_dir}/tensorboard"
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=folder)

    def write(self, record: Record) -> None:
        """See `Tracker`."""
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()
