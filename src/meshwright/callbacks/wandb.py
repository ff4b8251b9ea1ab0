"""The tracker `wandb`: every figure to Weights & Biases, with the recipe as its configuration."""

import importlib

from meshwright.callbacks.callback import Record
from meshwright.callbacks.tracker import Tracker, numbers_of
from meshwright.spec.run import Run


class WandB(Tracker):
    """Logs to a run of Weights & Biases."""

    def open(self, run: Run) -> None:
        """See `Tracker`."""
        self._session = importlib.import_module("wandb").init(dir=run.run_dir, config=run.model_dump(mode="json"))

    def write(self, record: Record) -> None:
        """See `Tracker`."""
        numbers = {f"{record['kind']}/{name}": value for name, value in numbers_of(record).items()}
        self._session.log(numbers, step=record["step"])

    def close(self) -> None:
        """See `Tracker`."""
        self._session.finish()
