"""The trackers that ship: requested and missing, and the records that they receive."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.callbacks import Tracker
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.metrics import new_record
from meshwright.trainer.plugins import open_trackers
from meshwright.trainer.start import require_plugins


def run_with(tmp_path: Path, *names: str) -> Run:
    return Run.model_validate({"model": "gpt2", "run_dir": str(tmp_path), "trackers": names})


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trackers: wandb is not installed: pip install 'meshwright\[wandb\]'"):
        require_plugins(run_with(tmp_path, "wandb"))
    require_plugins(run_with(tmp_path))


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tracker 'mlflow'"):
        run_with(tmp_path, "mlflow")


def test_trackers_receive_every_number_of_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the methods of TensorBoard's writer and wandb's run."""
    seen: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            seen.append(("open", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            seen.append(("close",))

    class Session:
        def log(self, numbers: dict[str, float], step: int) -> None:
            seen.append((numbers, step))

        def finish(self) -> None:
            seen.append(("finish",))

    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer  # type: ignore[attr-defined]
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: Session()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = run_with(tmp_path, "tensorboard", "wandb")
    training: Any = SimpleNamespace(run=run)
    record = new_record("step", step=3, loss=1.5, mfu=None, name="ignored")
    trackers = open_trackers(run)
    for tracker in trackers:
        tracker.on_record(training, record)
    for tracker in trackers:
        tracker.on_stop(training, record)
    scalars = [("open", f"{tmp_path}/tensorboard"), ("step/loss", 1.5, 3), ({"step/loss": 1.5}, 3)]
    assert seen == [*scalars, ("close",), ("finish",)]


def test_a_continued_run_is_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: opened.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        for tracker in open_trackers(run_with(folder, "wandb")):
            tracker.open(run_with(folder, "wandb"))  # type: ignore[attr-defined]
    first, second, other = opened
    assert first["id"] == second["id"] != other["id"]
    assert {one["resume"] for one in opened} == {"allow"}
    assert (first["name"], other["name"]) == (tmp_path.name, "other")


def test_a_full_disk_costs_a_tracker_a_record_and_no_more() -> None:
    class Full(Tracker):
        def write(self, record: dict[str, Any]) -> None:
            raise OSError(28, "No space left on device")

    Full().on_record(SimpleNamespace(run=None), new_record("step", step=1))  # type: ignore[arg-type]


def test_wandb_gets_project_group_and_name_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: opened.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: wandb)
    options = {"project": "small", "group": "rates", "name": "first"}
    recipe = {"model": "gpt2", "run_dir": str(tmp_path), "trackers": [{"name": "wandb", "options": options}, "wandb"]}
    run = Run.model_validate(recipe)
    assert run.tracker_names == ("wandb", "wandb")
    require_plugins(run)
    for _ in range(2):
        for tracker in open_trackers(parse_spec(dump_recipe(run), Run)):
            tracker.open(run)  # type: ignore[attr-defined]
    given, plain, *again = opened
    assert {key: given[key] for key in options} == options
    # None leaves the choice to wandb, which reads its own environment
    assert (plain["project"], plain["group"], plain["name"]) == (None, None, tmp_path.name)
    assert {one["id"] for one in opened} == {given["id"]}
    assert [one["name"] for one in again] == ["first", tmp_path.name]


def test_an_unknown_option_of_a_tracker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys)
    trackers = [{"name": "wandb", "options": {"projekt": "small"}}]
    run = Run.model_validate({"model": "gpt2", "run_dir": str(tmp_path), "trackers": trackers})
    with pytest.raises(ValueError, match="projekt"):
        require_plugins(run)
