"""Trackers: callbacks that copy every record of `metrics.jsonl` somewhere else, from the first rank."""

import contextlib
import importlib
import secrets
from pathlib import Path

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.spec.files import regular
from meshwright.spec.run import Run
from meshwright.storage.durable import write_durably


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
        if not self._opened:
            self.open(training.run)
            self._opened = True
        with contextlib.suppress(OSError):
            self.write(record)

    def on_stop(self, training: Training, record: Record) -> None:
        if self._opened:
            self.close()
            self._opened = False


def numbers_of(record: Record) -> dict[str, float]:
    """The figures of a record under their names; `step` and `time` are left out."""
    return {
        name: value for name, value in record.items() if name not in ("step", "time") and isinstance(value, int | float)
    }


class TensorBoard(Tracker):
    """The tracker `tensorboard`: every figure as scalar, by torch's writer, in the folder `tensorboard` of the run."""

    def open(self, run: Run) -> None:
        folder = f"{run.run_dir}/tensorboard"
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=folder)

    def write(self, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """The tracker `wandb`: every figure to Weights & Biases, with the recipe as its configuration. A continued run
    stays one run there: its id is in `wandb-id` of the run directory."""

    def __init__(self, project: str | None = None, group: str | None = None, name: str | None = None) -> None:
        """`project` and `group` default to wandb's own (WANDB_PROJECT, WANDB_RUN_GROUP), `name` to the run's folder."""
        super().__init__()
        self._place = {"project": project, "group": group}
        self._name = name

    def open(self, run: Run) -> None:
        kept = Path(run.run_dir) / "wandb-id"
        if not kept.is_file():
            write_durably(kept, secrets.token_hex(8) + "\n")
        self._session = importlib.import_module("wandb").init(
            dir=run.run_dir,
            config=run.model_dump(mode="json"),
            name=self._name or Path(run.run_dir).name,
            **self._place,
            id=regular(kept).read_text(encoding="utf-8").strip(),
            resume="allow",
        )

    def write(self, record: Record) -> None:
        numbers = {f"{record['kind']}/{name}": value for name, value in numbers_of(record).items()}
        self._session.log(numbers, step=record["step"])

    def close(self) -> None:
        self._session.finish()
