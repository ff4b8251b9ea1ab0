"""axolotl's intervals of saves and evaluations, and its schedule beside DeepSpeed's."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files

BASE = {"base_model": "gpt2", "micro_batch_size": 2, "learning_rate": 1e-4, "max_steps": 100, "warmup_steps": 5}
FINAL = "training.lr_schedule.final"


def axolotl(folder: Path, beside: dict[str, Any] | None = None, **keys: Any) -> tuple[dict[str, Any], Reading]:
    """The recipe of a configuration with more keys, and the reading."""
    (folder / "a.yml").write_text(yaml.safe_dump({**BASE, **keys}, sort_keys=False))
    files = [folder / "a.yml"]
    if beside is not None:
        files.append(folder / "ds.json")
        files[-1].write_text(json.dumps(beside))
    text, reading = import_files(files, ranks=1)
    return yaml.safe_load(text), reading


def told(reading: Reading, key: str) -> str:
    """What the report says about a key without a counterpart; empty if nothing."""
    return "\n".join(why for origin, why in reading.without if key in origin)


@pytest.mark.parametrize(
    ("keys", "every", "named"),
    [
        ({"save_steps": 9}, 9, ""),
        ({"save_steps": 9, "save_strategy": "steps"}, 9, ""),
        ({"save_strategy": "steps"}, 500, ""),
        ({"save_steps": 9, "save_strategy": "epoch"}, None, "save_steps=9"),
        ({"save_strategy": "no"}, None, ""),
        ({"save_strategy": "epoch"}, None, "save_strategy=epoch"),
        ({}, None, ""),
        ({"saves_per_epoch": 1}, None, ""),  # after the last step
        ({"saves_per_epoch": 4, "num_epochs": 2}, None, "saves_per_epoch=4"),
    ],
)
def test_checkpoints(tmp_path: Path, keys: dict[str, Any], every: int | None, named: str) -> None:
    recipe, reading = axolotl(tmp_path, **keys)
    assert recipe.get("checkpoint") == ({"every": every, "keep_last": 4} if every else None)
    assert bool([note for note in reading.notes if "saves after each epoch by default" in note]) == (not keys)
    assert bool(told(reading, "save")) == bool(named)
    assert told(reading, named) if named else True
    if "num_epochs" in keys:
        assert "every 1/8 of all steps" in told(reading, named)


@pytest.mark.parametrize(
    ("keys", "every", "named"),
    [
        ({"eval_steps": 9, "val_set_size": 0.1}, 9, ""),
        ({"eval_steps": 9, "val_set_size": 0.1, "eval_strategy": "steps"}, 9, ""),
        ({"eval_steps": 9, "test_datasets": [{"path": "a"}]}, 9, ""),
        ({"eval_steps": 9}, None, "eval_steps=9"),
        ({"eval_steps": 9, "val_set_size": 0.0}, None, "eval_steps=9"),
        ({"eval_steps": 9, "val_set_size": 0.1, "eval_strategy": "no"}, None, "eval_steps=9"),
        ({"eval_strategy": "steps", "val_set_size": 0.1, "logging_steps": 3}, 3, ""),
        ({"eval_strategy": "steps", "val_set_size": 0.1}, None, "eval_steps=logging_steps"),
        ({"eval_strategy": "epoch", "val_set_size": 0.1}, None, "eval_strategy=epoch"),
        ({"evals_per_epoch": 2, "val_set_size": 0.1}, None, "evals_per_epoch=2"),
        ({"evals_per_epoch": 2}, None, "evals_per_epoch=2"),
    ],
)
def test_evaluations(tmp_path: Path, keys: dict[str, Any], every: int | None, named: str) -> None:
    recipe, reading = axolotl(tmp_path, **keys)
    assert recipe["training"].get("evaluation", {}).get("every") == every
    assert bool(told(reading, "eval")) == bool(named)
    assert told(reading, named) if named else True
    if "evals_per_epoch" in keys:
        assert ("has no effect" in told(reading, named)) == ("val_set_size" not in keys)


def test_the_least_rate_is_of_axolotls_cosine(tmp_path: Path) -> None:
    recipe, reading = axolotl(tmp_path, cosine_min_lr_ratio=0.2)
    assert recipe["training"]["lr_schedule"]["final"] == 0.2
    assert not told(reading, "cosine_min_lr_ratio")
    recipe, reading = axolotl(tmp_path, cosine_min_lr_ratio=0.2, lr_scheduler="linear")
    assert recipe["training"]["lr_schedule"]["final"] == 0.0
    assert "lr_scheduler=cosine only" in told(reading, "cosine_min_lr_ratio=0.2")


@pytest.mark.parametrize(
    ("scheduler", "final"),
    [
        ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}, 0.0),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}, 1e-4),
    ],
)
def test_deepspeeds_scheduler_counts_before_axolotls(tmp_path: Path, scheduler: Any, final: float) -> None:
    configuration = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "scheduler": scheduler}
    for keys in ({"deepspeed": "ds.json"}, {"deepspeed": configuration}):
        given = None if isinstance(keys["deepspeed"], dict) else configuration
        recipe, reading = axolotl(tmp_path, given, cosine_min_lr_ratio=0.2, **keys)
        assert recipe["training"]["lr_schedule"]["final"] == final
        assert "DeepSpeed's schedule is used" in told(reading, "cosine_min_lr_ratio=0.2")
