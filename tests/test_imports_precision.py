"""Accelerate's file: the precision where a program's arguments name one too, and degrees of a wrong kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

ARGUMENTS = {"output_dir": "out", "learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 50}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
FP8 = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 1}}


def imported(folder: Path, *files: dict[str, Any]) -> tuple[dict[str, Any], Reading]:
    """The recipe of these files, named a.json, b.json, ..., and the reading."""
    paths = [folder / f"{'abc'[number]}.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    text, reading = import_files(paths, model="gpt2")
    return yaml.safe_load(text), reading


def told(reading: Reading, key: str) -> str:
    """What the report says about a key without a counterpart; empty if nothing."""
    return "\n".join(why for origin, why in reading.without if key in origin)


def test_fp8_settings_without_fp8_are_named(tmp_path: Path) -> None:
    _, reading = imported(tmp_path, ARGUMENTS | {"bf16": True}, ACCELERATE | FP8)
    assert "has no effect" in told(reading, "fp8_config.backend=TE")
    assert "has no effect" in told(reading, "fp8_config.margin=1")


@pytest.mark.parametrize("size", [{"a": 1}, "auto", [2]])
@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "tp", "cp", "sp"])
def test_a_degree_of_another_kind_is_one_error(tmp_path: Path, name: str, size: Any) -> None:
    degrees = {f"parallelism_config_{name}_size": size}
    with pytest.raises(UserError, match=rf"^b\.json: parallelism_config\.parallelism_config_{name}_size=.*: must be a"):
        imported(tmp_path, ARGUMENTS, ACCELERATE | {"parallelism_config": degrees})
