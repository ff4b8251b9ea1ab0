"""How a rank finds its place, and what happens when processes are started: torchrun's, Slurm's, Kubeflow's, our own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec.run import Run
from meshwright.trainer.launch import Nodes, Worker, find_nodes, find_worker, start_workers
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.signals import StopRequest
from meshwright.trainer.status import STOPPED

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "1234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[003-010,012],login1"}


def test_nobody_started_us() -> None:
    assert find_worker({}) is None
    assert find_nodes({}) == Nodes()


def test_torchrun() -> None:
    expected = Worker(rank=5, local_rank=1, world_size=8, local_world_size=4, store="127.0.0.1:29500")
    assert find_worker(TORCHRUN) == expected
    restarted = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "77", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "0"}
    assert find_worker(TORCHRUN | restarted) == Worker(
        rank=0, local_rank=1, world_size=8, local_world_size=4, store="gpu1:77", hosts_store=True, attempt=2
    )
    agent = restarted | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not find_worker(TORCHRUN | agent).hosts_store  # type: ignore[union-attr]


def test_srun_with_a_task_per_rank() -> None:
    environment = SLURM | {"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    expected = Worker(rank=9, local_rank=1, world_size=16, local_world_size=8, store="gpu003:21234")
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
        start_workers(
            Run.model_validate(RECIPE | {"layout": {"dp_shard": 4}}), Nodes(count=3), [], StopRequest(raises=True)
        )


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


def start(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "meshwright", "train", "run.yaml", "training.steps=100000", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=clean_environment(), **pipes)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(folder / "run" / "metrics.jsonl") if record["kind"] == kind]


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it never happened")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids below `process` that are ranks, in the order of their start."""
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in below if b"meshwright" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_worker_is_started_again_and_a_signal_saves_once(folder: Path) -> None:
    """kill -9 of one worker: all start again from the newest checkpoint. SIGUSR1 to one: all save and leave alike."""
    process = start(folder, "layout.dp_shard=2", "checkpoint.every=5")
    wait_for(lambda: records(folder, "checkpoint"))
    os.kill(workers_of(process)[1], signal.SIGKILL)
    wait_for(lambda: len(records(folder, "start")) == 2)
    again = records(folder, "start")[1]["step"]
    assert again > 0
    wait_for(lambda: len(steps_of(folder)) > 5 and steps_of(folder)[-1][0] > again)
    os.kill(workers_of(process)[1], signal.SIGUSR1)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED, errors
    assert "error: rank 1 was killed by SIGKILL" in errors
    assert "starting again (1 of 3 without a new checkpoint)" in errors
    assert "passed over" not in out
    [stopped] = records(folder, "stopped")
    assert f"stopped by SIGUSR1 after step {stopped['step']}; continue with --resume" in out
    assert steps_of(folder)[-1][0] == stopped["step"]
    newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{stopped['step']:08d}"
    done = meshwright(folder, "train", "run.yaml", "--resume", "auto", f"training.steps={stopped['step'] + 1}")
    assert done.returncode == 0, done.stderr
    assert steps_of(folder)[-1][0] == stopped["step"] + 1


def test_signals_to_the_launcher_before_and_while_it_trains(folder: Path) -> None:
    process = start(folder, "layout.dp_shard=2")
    wait_for(lambda: len(workers_of(process)) == 2)
    process.send_signal(signal.SIGTERM)  # workers are still starting
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED, errors
    assert "Traceback" not in errors
    assert not records(folder, "step")
    process = start(folder, "layout.dp_shard=2")
    wait_for(lambda: records(folder, "step"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert "stopped; continue with --resume (newest checkpoint: step-" in errors
    assert not workers_of_nobody(folder)


def workers_of_nobody(folder: Path) -> list[int]:
    """Processes whose working directory is the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [int(entry.parent.name)] if entry.resolve() == folder.resolve() else []
        except OSError:
            continue
    return found


def test_torchrun_passes_a_signal_on(folder: Path) -> None:
    """SIGTERM to torchrun itself, which it hands to its workers; then SIGUSR1 to one of them."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    for number, to_worker in ((signal.SIGTERM, False), (signal.SIGUSR1, True)):
        resumed = len(records(folder, "start"))
        process = start(folder, "layout.dp_shard=2", "--resume", "auto", launcher=launcher)
        wait_for(lambda resumed=resumed: len(records(folder, "start")) > resumed and records(folder, "step"))
        before = len(records(folder, "step"))
        wait_for(lambda before=before: len(records(folder, "step")) > before)
        os.kill(workers_of(process)[1] if to_worker else process.pid, number)
        out, errors = process.communicate(timeout=60)
        stopped = records(folder, "stopped")[-1]
        assert f"stopped by {number.name} after step {stopped['step']}" in out
        assert (folder / "run" / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()
        if to_worker:
            assert f"exitcode  : {STOPPED}" in errors
