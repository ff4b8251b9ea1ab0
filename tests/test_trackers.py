"""The optional taps: asked for and missing, and what they are handed."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec.run import Run
from meshwright.trainer.metrics import Journal
from meshwright.trainer.trackers import open_trackers, require_trackers


def run_with(tmp_path: Path, *names: str) -> Run:
    return Run.model_validate({"model": "gpt2", "run_dir": str(tmp_path), "trackers": names})


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trackers: wandb is not installed; pip install 'meshwright\[wandb\]'"):
        require_trackers(run_with(tmp_path, "wandb"))
    require_trackers(run_with(tmp_path))


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tracker 'mlflow'"):
        run_with(tmp_path, "mlflow")


def test_taps_receive_every_number_of_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the calls that TensorBoard's writer and wandb's run offer."""
    seen: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            seen.append(("open", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def flush(self) -> None:
            pass

    class Session:
        def log(self, numbers: dict[str, float], step: int) -> None:
            seen.append((numbers, step))

    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer  # type: ignore[attr-defined]
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: Session()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Journal(tmp_path / "metrics.jsonl", taps=open_trackers(run_with(tmp_path, "tensorboard", "wandb"))) as journal:
        journal.write("step", step=3, loss=1.5, mfu=None, name="ignored")
    assert seen == [("open", f"{tmp_path}/tensorboard"), ("step/loss", 1.5, 3), ({"step/loss": 1.5}, 3)]
