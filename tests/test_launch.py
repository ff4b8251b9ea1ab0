"""How a rank finds its place, and what happens when processes are started: torchrun's, Slurm's, Kubeflow's, our own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec.layout import LayoutSpec
from meshwright.trainer.launch import Nodes, Worker, find_nodes, find_worker, start_workers
from meshwright.trainer.metrics import read_journal

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "1234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[003-010,012],login1"}


def test_nobody_started_us() -> None:
    assert find_worker({}) is None
    assert find_nodes({}) == Nodes()


def test_torchrun() -> None:
    assert find_worker(TORCHRUN) == Worker(rank=5, local_rank=1, world_size=8, local_world_size=4)


def test_srun_with_a_task_per_rank() -> None:
    environment = SLURM | {"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    expected = Worker(rank=9, local_rank=1, world_size=16, local_world_size=8, rendezvous="tcp://gpu003:21234")
    assert find_worker(environment) == expected


def test_srun_with_a_task_per_machine() -> None:
    environment = SLURM | {
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
    }
    assert find_worker(environment) is None
    assert find_nodes(environment) == Nodes(count=2, rank=1, address="gpu003", port=21234)


def test_an_interactive_slurm_shell_is_an_ordinary_machine() -> None:
    environment = SLURM | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
    assert find_worker(environment) is None
    assert find_nodes(environment) == Nodes()


def test_kubeflow() -> None:
    environment = {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
    }
    assert find_nodes(environment) == Nodes(count=4, rank=3, address="job-node-0-0.job", port=29400)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a number"),
        ({"PET_NNODES": "2"}, "no PET_NODE_RANK"),
    ],
)
def test_senseless_environments(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_worker(environment) or find_nodes(environment)


def test_ranks_that_do_not_fit_the_machines() -> None:
    with pytest.raises(ValueError, match="4 ranks cannot be split evenly over 3 machines"):
        start_workers(LayoutSpec(dp_shard=4), Nodes(count=3), [])


# From here on whole programs run, as a user starts them.

RECIPE: dict[str, Any] = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 2, "ffn": 64},
    "data": {"sources": ["*.txt"], "sequence_length": 32, "tokenizer_vocab": 300},
    "training": {
        "steps": 4,
        "global_batch": 8,
        "precision": "fp32",
        "lr_schedule": {"warmup": 1},
        "evaluation": {"batches": 2},
    },
    "checkpoint": {"every": 2},
    "device": "cpu",
    "run_dir": "run",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a recipe and two texts."""
    (tmp_path / "run.yaml").write_text(json.dumps(RECIPE))  # JSON is YAML
    for name in "ab":
        text = "".join(f"{name}{i} = {i} * {i}  # square of {i}\n" for i in range(2000))
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def clean_environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in names}


def meshwright(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "meshwright", *words]
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False
    )


def steps_of(folder: Path) -> list[tuple[int, float]]:
    records = read_journal(folder / "run" / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]


def test_one_process_two_processes_and_torchrun_train_the_same(folder: Path) -> None:
    runs = {}
    for name, words, launcher in (
        ("alone", (), ()),
        ("ours", ("layout.dp_shard=2",), ()),
        ("torchrun", ("layout.dp_replicate=2",), ("-m", "torch.distributed.run", "--nproc-per-node", "2")),
    ):
        done = meshwright(folder, "train", "run.yaml", *words, launcher=launcher)
        assert done.returncode == 0, done.stderr
        runs[name] = steps_of(folder)
        assert [step for step, _ in runs[name]] == [1, 2, 3, 4]
        assert "saved run/checkpoints/step-00000004" in done.stdout
        assert {path.name for path in (folder / "run").iterdir()} >= {
            "recipe.yaml", "resolved.yaml", "env.json", "metrics.jsonl", "checkpoints", "tokenizer"
        }  # fmt: skip
        (folder / "run").rename(folder / name)
    for name in ("ours", "torchrun"):
        for (_, loss), (_, expected) in zip(runs[name], runs["alone"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order, four steps deep


def test_a_run_continues_and_is_never_overwritten(folder: Path) -> None:
    assert meshwright(folder, "train", "run.yaml", "training.steps=4").returncode == 0
    again = meshwright(folder, "train", "run.yaml")
    assert again.returncode == 2
    assert again.stderr.strip().startswith(
        "error: run already holds a run (up to step-00000004); continue it with --resume"
    )
    more = meshwright(folder, "train", "run.yaml", "training.steps=6", "layout.dp_shard=2", "--resume")
    assert more.returncode == 0, more.stderr
    assert "continuing from run/checkpoints/step-00000004, step 4" in more.stdout
    assert [step for step, _ in steps_of(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_mistake_in_a_worker_is_told_once(folder: Path) -> None:
    """A learning rate that destroys the model: every rank sees it, one line says so, no stack trace."""
    done = meshwright(
        folder, "train", "run.yaml", "layout.dp_shard=2", "training.optimizer.lr=1e30", "training.steps=50"
    )
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "training.non_finite=skip" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_number_of_processes_is_told(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = meshwright(folder, "train", "run.yaml", launcher=launcher)
    assert done.returncode != 0
    assert "the layout needs 1 processes but 2 were started" in done.stderr


def test_interrupting_the_parent_ends_the_workers(folder: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "meshwright",
            "train",
            "run.yaml",
            "layout.dp_shard=2",
            "training.steps=100000",
        ],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(r["kind"] == "step" for r in read_journal(journal)):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "interrupted"
    time.sleep(0.5)
    size = journal.stat().st_size
    time.sleep(1)
    assert journal.stat().st_size == size  # nobody trains on
