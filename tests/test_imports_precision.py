"""The precision where a program's arguments and Accelerate's file both name one."""

import json
from pathlib import Path
from typing import Any

import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files

ARGUMENTS = {"output_dir": "out", "learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 50}
AXOLOTL = {"base_model": "gpt2", "micro_batch_size": 2, "learning_rate": 1e-4, "max_steps": 100}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
FP8 = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 1}}


def imported(folder: Path, *files: dict[str, Any]) -> tuple[dict[str, Any], Reading]:
    """The recipe of these files, named a.json, b.json, ..., and the reading."""
    paths = [folder / f"{'abc'[number]}.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    text, reading = import_files(paths, model=None if "base_model" in str(files) else "gpt2")
    return yaml.safe_load(text), reading


def told(reading: Reading, key: str) -> str:
    """What the report says about a key without a counterpart; empty if nothing."""
    return "\n".join(why for origin, why in reading.without if key in origin)


def test_fp8_settings_without_fp8_are_named(tmp_path: Path) -> None:
    _, reading = imported(tmp_path, ARGUMENTS | {"bf16": True}, ACCELERATE | FP8)
    assert "has no effect" in told(reading, "fp8_config.backend=TE")
    assert "has no effect" in told(reading, "fp8_config.margin=1")


def test_an_omitted_precision_of_axolotl_is_noted(tmp_path: Path) -> None:
    for keys, noted in (({}, True), ({"bf16": False}, False), ({"bf16": None}, False), ({"fp16": True}, False)):
        _, reading = imported(tmp_path, AXOLOTL | keys)
        assert bool([note for note in reading.notes if "take bf16=auto" in note]) == noted
