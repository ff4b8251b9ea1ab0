"""The one place for optional taps on the metrics: TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from meshwright.spec.run import Run

Tap = Callable[[dict[str, Any]], None]
"""Called with every record that is written to `metrics.jsonl`."""


def require_trackers(run: Run) -> None:
    """Raise `ValueError` where a package that the recipe asks for is missing."""
    for name in run.trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"trackers: {name} is not installed; pip install 'meshwright[{name}]', or leave it out")


def open_trackers(run: Run) -> list[Tap]:
    """The taps that the recipe asks for."""
    return [{"tensorboard": _open_tensorboard, "wandb": _open_wandb}[name](run) for name in run.trackers]


def _open_tensorboard(run: Run) -> Tap:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=f"{run.run_dir}/tensorboard")

    def tap(record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        writer.flush()

    return tap


def _open_wandb(run: Run) -> Tap:
    session = importlib.import_module("wandb").init(dir=run.run_dir, config=run.model_dump(mode="json"))

    def tap(record: dict[str, Any]) -> None:
        numbers = {f"{record['kind']}/{name}": value for name, value in _numbers(record).items()}
        session.log(numbers, step=record["step"])

    return tap


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in record.items() if name not in ("step", "time") and isinstance(value, int | float)
    }
