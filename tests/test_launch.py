"""How a rank finds its place, and how processes behave when started by torchrun, Slurm, Kubeflow or our launcher."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launched import Program, ranks_of
from meshwright.checkpoint.manifest import latest_checkpoint, step_of
from meshwright.cli.main import main
from meshwright.launch.launcher import LAUNCHER, Nodes, Worker, find_nodes, find_worker, join_group, start_workers
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import MISUSE, STOPPED
from meshwright.launch.supervise import RestartPolicy
from meshwright.spec.run import Run
from meshwright.trainer.metrics import read_journal

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-010,012],login1",
}


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


def test_whose_end_ends_a_worker() -> None:
    def parent(**more: str) -> int:
        worker = find_worker(TORCHRUN | more)
        assert worker is not None
        return worker.parent

    assert parent() == 0  # a user's script, which may end before its ranks
    assert parent(TORCHELASTIC_RUN_ID="none") == os.getppid()
    assert parent(**{LAUNCHER: "1234"}) == 1234


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


def test_a_batch_script_without_srun_on_one_machine_is_an_ordinary_machine() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
    assert find_worker(environment) is None
    assert find_nodes(environment) == Nodes()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "start it with srun"),
        ({"SLURM_NNODES": "2"}, "this Slurm job has 2 machines, but meshwright was started on one"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            "mpirun started 4 copies, each of which",
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpirun started 4 copies, each of which"),
    ],
)
def test_copies_that_would_not_find_one_another_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_worker(environment)


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
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is missing"),
    ],
)
def test_senseless_environments(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_worker(environment) or find_nodes(environment)


def test_ranks_that_do_not_fit_the_machines() -> None:
    run = Run.model_validate(RECIPE | {"layout": {"dp_shard": 4}})
    with pytest.raises(ValueError, match="4 ranks cannot be split evenly over 3 machines"):
        start_workers(run, Nodes(count=3), [], StopRequest(raises=True), RestartPolicy(run_dir=None))


def test_a_wrong_number_of_processes_is_told() -> None:
    with pytest.raises(ValueError, match="the layout needs 1 processes, but 2 were started"):
        join_group(Worker(world_size=2), Run.model_validate(RECIPE), torch.device("cpu"))


# From here on, whole programs run as a user starts them. They share a folder and its prepared tokens.

RECIPE: dict[str, Any] = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 2, "ffn": 64},
    "data": {"sources": ["*.txt"], "sequence_length": 32, "tokenizer_vocab": 300},
    "training": {
        "steps": 100000,
        "global_batch": 8,
        "precision": "fp32",
        "lr_schedule": {"name": "constant", "warmup": 1},
        "evaluation": {"batches": 2},
    },
    "checkpoint": {"every": 5},
    "device": "cpu",
}
TORCHRUN_PROGRAM = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe and two texts."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "run.yaml").write_text(json.dumps(RECIPE))  # JSON is YAML
    for name in "ab":
        text = "".join(f"{name}{i} = {i} * {i}  # square of {i}\n" for i in range(2000))
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    """The first four steps' losses on one process, this one."""
    with contextlib.chdir(folder):
        assert main(["train", "run.yaml", "training.steps=4", "run_dir=alone"]) == 0
    return [record["loss"] for record in records(folder / "alone", "step")]


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(run / "metrics.jsonl") if record["kind"] == kind]


def check_losses(run: Path, expected: list[float]) -> None:
    """The first four steps equal one process's, except for the order of fp32 sums."""
    found = [record["loss"] for record in records(run, "step")][:4]
    assert found == [pytest.approx(loss, rel=1e-5) for loss in expected]


@contextlib.contextmanager
def started(*words: str, launcher: tuple[str, ...] = ()) -> Iterator[Program | subprocess.Popen[str]]:
    """`meshwright train run.yaml` in its own process group, as a shell starts it; no process of it remains."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    command = [sys.executable, *launcher, "-m", "meshwright", "train", "run.yaml", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = (
        subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        if launcher
        else Program("train", "run.yaml", *words, env=environment)
    )
    with program as process:
        try:
            yield process
        finally:
            below = ranks_of(process.pid) if process.poll() is None else []
            for pid in [process.pid, *below]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def wait_for_step(run: Path, step: int, *, starts: int = 1) -> None:
    """Wait until the run has been started this often and has since made this step."""

    def there() -> bool:
        seen = read_journal(run / "metrics.jsonl")
        begun = [place for place, record in enumerate(seen) if record["kind"] == "start"]
        return len(begun) >= starts and any(
            record["kind"] == "step" and record["step"] >= step for record in seen[begun[starts - 1] :]
        )

    wait_for(there)


def ends(process: Program | subprocess.Popen[str], status: int) -> tuple[str, str]:
    """Output and errors of a program that now ends with this status."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    return out, errors


def newest(run: Path) -> int:
    return step_of(latest_checkpoint(run / "checkpoints"))


@pytest.mark.slow
def test_two_processes_train_as_one_stop_at_ctrl_c_and_continue(
    here: Path, losses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C signals the launcher and its workers. Then the run resumes, into an error that every rank sees: a learning
    rate that destroys the model is reported in one line, without a stack trace."""
    run, words = here / "ours", ("run_dir=ours", "layout.dp_shard=2")
    with started(*words) as process:
        wait_for_step(run, 4)
        os.killpg(process.pid, signal.SIGINT)
        out, errors = ends(process, STOPPED)
    check_losses(run, losses)
    [stopped] = records(run, "stopped")
    assert f"stopped by SIGINT after step {stopped['step']}\n" in out
    assert f"stopped; continue with --resume (newest checkpoint: step-{stopped['step']:08d})" in errors
    assert (out + errors).count("continue with --resume") == 1
    assert records(run, "step")[-1]["step"] == newest(run) == stopped["step"]
    assert {"recipe.yaml", "resolved.yaml", "env.json", "tokenizer"} < {path.name for path in run.iterdir()}

    assert main(["train", "run.yaml", *words]) == MISUSE
    assert f"ours already contains a run (up to step-{newest(run):08d}); continue it with" in capsys.readouterr().err
    with started(*words, "--resume", "training.optimizer.lr=1e30") as process:
        out, errors = ends(process, MISUSE)
    assert f"continuing from ours/checkpoints/step-{stopped['step']:08d}, step {stopped['step']}" in out
    assert errors.count("error: ") == 1, errors
    assert "training.non_finite=skip" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_none_outlives_the_launcher(here: Path) -> None:
    """kill -9 of one worker: all restart from the newest checkpoint. Of the launcher: all end. Nothing is lost."""
    run = here / "killed"
    with started("run_dir=killed", "layout.dp_shard=2") as process:
        wait_for_step(run, 5)
        wait_for(lambda: records(run, "checkpoint"))
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        wait_for(lambda: len(records(run, "start")) == 2)
        again = records(run, "start")[1]["step"]
        assert again > 0
        wait_for_step(run, again + 5, starts=2)
        workers = ranks_of(process.pid)
        assert len(workers) == 2
        process.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        _, errors = ends(process, -signal.SIGKILL)
    assert "error: rank 1 was killed by SIGKILL" in errors
    assert "starting again (1 of 3 without a new checkpoint)" in errors
    assert "passed over" not in errors
    assert f"the launcher (process {process.pid}) has ended" in errors
    reached = records(run, "step")[-1]["step"]
    assert newest(run) >= reached - 2 * RECIPE["checkpoint"]["every"]  # the last one may have been in progress
    last = f"training.steps={newest(run) + 1}"
    assert main(["train", "run.yaml", "run_dir=killed", "--resume", last]) == 0  # one process continues from it


@pytest.mark.slow
def test_a_signal_while_workers_start_leaves_nothing(here: Path) -> None:
    with started("run_dir=early", "layout.dp_shard=2") as process:
        workers = wait_for(lambda: len(ranks_of(process.pid)) == 2 and ranks_of(process.pid))
        process.send_signal(signal.SIGTERM)
        _, errors = ends(process, STOPPED)
    assert "stopped before the first checkpoint; start again without --resume" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not records(here / "early", "step")


@pytest.mark.exhaustive
def test_torchrun_passes_signals_on(here: Path, losses: list[float]) -> None:
    """SIGUSR1 to torchrun itself, which is configured to forward it to its workers."""
    run, words = here / "torchrun", ("run_dir=torchrun", "layout.dp_replicate=2", "--resume", "auto")
    handling = (*TORCHRUN_PROGRAM, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    with started(*words, launcher=handling) as process:
        wait_for_step(run, 4)
        process.send_signal(signal.SIGUSR1)
        out, errors = ends(process, 1)
    check_losses(run, losses)
    first = records(run, "stopped")[-1]["step"]
    assert f"stopped by SIGUSR1 after step {first}\n" in out
    assert errors.count(f"stopped; continue with --resume (newest checkpoint: step-{first:08d})") == 1
    assert newest(run) == first


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_programs_end_with_the_process_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    """`compare` and `verify --engine` may be killed while an engine compiles for minutes, or hangs."""
    code = """if True:
        import sys, time
        from pathlib import Path
        from meshwright.cli.common import stoppable
        from meshwright.launch.programs import RankedProgram

        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        with stoppable("it"), RankedProgram(sleep, 2, Path("log")) as it:
            print(*(process.pid for process in it._processes), flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        ranks = [int(word) for word in starter.stdout.readline().split()]
        assert len(ranks) == 2
        starter.send_signal(number)
        starter.wait(30)
    deadline = time.monotonic() + 30
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [rank for rank in ranks if is_running(rank)]


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FAILING_WORKER = """
import runpy, sys, threading
from meshwright.launch import launcher
def fail(*_):
    raise {error}
launcher.find_worker = fail
sys.argv = ["worker", *{words}]
threading.Thread(target=threading.Event().wait).start()  # as NCCL's teardown may: Python's own end waits for it
runpy.run_module({module!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("meshwright.trainer.worker", ["--resolved", "resolved.yaml"]),
        ("meshwright.prove.worker", ["--folder", "proof", "--steps", "1"]),
        ("meshwright.cli.ranks", ["generate"]),
    ],
)
def test_a_rank_that_fails_ends_at_once(module: str, words: list[str]) -> None:
    """With its error, so that the other ranks need not wait for their time-out."""
    program = FAILING_WORKER.format(error='KeyError("planted")', words=words, module=module)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "KeyError: 'planted'" in ended.stderr
