"""Code that never runs, and listening addresses: docs/security.md, compared with what processes do."""

import subprocess
import sys
from pathlib import Path

import pytest

from launched import Program, listening, ranks_of

RECIPE = """\
model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, max_positions: 32}
data: {sources: "*.txt", tokenizer_vocab: 260, sequence_length: 8}
training: {steps: 2, global_batch: 2, precision: fp32, lr_schedule: {warmup: 1}}
layout: {dp_shard: 2}
device: cpu
run_dir: runs/small
"""

OTHERS = ("numpy", "torch", "yaml", "pydantic", "tokenizers", "jinja2", "safetensors", "transformers")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with a trap module for every name that a program might import."""
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "a.txt").write_text("one fish two fish\n" * 30)
    # `python -m` itself imports these from there, before anything can prevent it; docs/security.md says so.
    code = "import runpy, sys; print(*sys.modules)"
    before_us = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    for name in {*sys.stdlib_module_names, *OTHERS} - {*before_us.split()}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n1 / 0\n")
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train", "run.yaml"),
        ("verify", "run.yaml", "--steps", "1"),
        ("data", "prepare", "run.yaml"),
    ],
    ids=" ".join,
)
def test_nothing_of_the_working_directory_is_imported(hostile: Path, words: tuple[str, ...]) -> None:
    """Neither by the program, its workers, proofs, rehearsals and encoders, nor by their imports."""
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=hostile, capture_output=True, text=True, timeout=300)
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert done.returncode == 0, done.stderr


def test_encoders_import_nothing_of_the_working_directory(hostile: Path) -> None:
    """They start only for long text."""
    code = (
        "from meshwright.data.encoders import Encoders, serve, _start\n"
        "process = _start(); out, _ = process.communicate(); assert process.returncode == 0\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=hostile, capture_output=True, text=True, timeout=60)
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_on_one_machine_listens_to_nobody_else(hostile: Path) -> None:
    with Program("train", "run.yaml", "training.steps=1000000", cwd=hostile) as process:
        while not process.stdout.readline().startswith("step 1/"):
            assert process.poll() is None
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        assert {address for address, _ in listening({process.pid, *ranks})} == {"0100007F"}  # 127.0.0.1
