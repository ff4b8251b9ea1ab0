"""The one place for optional taps on the metrics: TensorBoard and Weights & Biases."""

import importlib
from collections.abc import Callable
from typing import Any

from meshwright.spec.run import Run

Tap = Callable[[dict[str, Any]], None]
"""Called with every record that is written to `metrics.jsonl`."""


def open_trackers(run: Run) -> list[Tap]:
    """The taps that the recipe asks for; raises `ValueError` where a package is missing."""
    return [{"tensorboard": _open_tensorboard, "wandb": _open_wandb}[name](run) for name in run.trackers]


def _open_tensorboard(run: Run) -> Tap:
    writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(log_dir=f"{run.run_dir}/tensorboard")

    def tap(record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        writer.flush()

    return tap


def _open_wandb(run: Run) -> Tap:
    session = _need("wandb", "wandb").init(dir=run.run_dir, config=run.model_dump(mode="json"))

    def tap(record: dict[str, Any]) -> None:
        numbers = {f"{record['kind']}/{name}": value for name, value in _numbers(record).items()}
        session.log(numbers, step=record["step"])

    return tap


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in record.items() if name not in ("step", "time") and isinstance(value, int | float)
    }


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"trackers: {extra} is not installed; pip install 'meshwright[{extra}]', or leave it out"
        ) from None
