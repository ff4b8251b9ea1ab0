"""Runs that an older version trained for three steps continue as in that version."""

import json
import shutil
from pathlib import Path

import pytest

from meshwright.cli.main import main

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"

CASES = {
    "llama-zero3": [],  # the layout that saved it: two processes
    "llama-zero3 on one process": ["layout.dp_shard=1", "layout.zero=0"],
    "deepseek-fp16": [],
    "llama-lora": [],
    "gpt2-8bit": [],
}
TOLERANCE = {"llama-zero3": 1e-12, "llama-lora": 1e-12, "gpt2-8bit": 1e-5, "deepseek-fp16": 2e-3}
"""Relative tolerance of a loss three steps later: a few units in the last place of the compute dtype, fp64 to fp16."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_older_version_s_run_continues(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = case.split()[0]
    shutil.copytree(FIXTURES / name, tmp_path / name)
    shutil.copy(FIXTURES / "corpus.txt", tmp_path)
    monkeypatch.chdir(tmp_path / name)
    assert main(["train", "recipe.yaml", "--resume", "training.steps=6", *CASES[case]]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["loss"] for record in records if record["kind"] == "step"}
    expected = json.loads(Path("expected.json").read_text())
    for step in (4, 5, 6):
        assert found[step] == pytest.approx(expected[step - 1], rel=TOLERANCE[name]), step
