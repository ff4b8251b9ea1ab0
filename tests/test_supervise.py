"""The launcher's handling of its workers: here they are small programs that behave like ranks."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.launch import launchers as launchers_module
from meshwright.launch import supervise as supervise_module
from meshwright.launch.launchers import POLL_SECONDS
from meshwright.launch.memory import MemoryWatch, host_pressure, memory_for_files, memory_there
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import CRASH_LOOP, OUT_OF_MEMORY, STOPPED, STUCK, TrainingStopped
from meshwright.launch.supervise import RestartPolicy, WorkerSpec, supervise
from meshwright.trainer.metrics import stepped_since

PRELUDE = """
import json, os, signal, sys, time
rank, attempt, again = os.environ["RANK"], int(os.environ["ATTEMPT"]), sys.argv[1:]
def step(): print(json.dumps({"kind": "step", "step": 1, "time": time.time()}), file=open("metrics.jsonl", "a"))
def save(n): os.makedirs(f"checkpoints/step-{n:08d}")
def ready(): open(f"ready.{rank}.{attempt}", "w").close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise_module, "LAST_WORDS_SECONDS", 0.3)
    return tmp_path


def job(folder: Path, script: str, *, ranks: int = 2, store: dist.Store | None = None, **options: Any) -> WorkerSpec:
    def environments(attempt: int) -> list[dict[str, str]]:
        return [{**os.environ, "RANK": str(rank), "ATTEMPT": str(attempt)} for rank in range(ranks)]

    command = [sys.executable, "-c", PRELUDE + script]
    stepped = functools.partial(stepped_since, folder / "metrics.jsonl")
    nodes, node = options.pop("nodes", 1), options.pop("node", 0)
    policy = RestartPolicy(**{"run_dir": folder, "restarts": 3, "stepped": stepped, **options})
    store = store or dist.HashStore()
    return WorkerSpec(command=command, environments=environments, policy=policy, store=store, node=node, nodes=nodes)


def run(job: WorkerSpec) -> int:
    with StopRequest(raises=True) as stop:
        return supervise(job, stop)


def test_all_is_well(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(job(folder, "assert not again")) == 0
    assert capfd.readouterr().err == ""


def test_a_crash_is_continued_from_the_newest_good_checkpoint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
if attempt == 0:
    if rank == "1": step(); save(5); os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
assert again == ["--resume", "auto"]
"""
    began = time.monotonic()
    assert run(job(folder, script)) == 0
    assert time.monotonic() - began < 30  # the launcher did not wait for the survivor
    said = capfd.readouterr().err
    assert "error: rank 1 was killed by SIGKILL\n" in said
    assert "starting again (1 of 3 without a new checkpoint); the newest checkpoint is step-00000005" in said


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "rank 1 was killed by SIGKILL\n"),
        (f"sys.exit({STUCK})", STUCK, f"rank 1 ended with status {STUCK}"),
    ],
    ids=["killed", "stuck"],
)
def test_of_workers_that_end_between_two_looks_the_one_that_says_why_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: str, status: int, said: str
) -> None:
    """Status 1 may only mean that a rank lost its connection to the failed one."""
    monkeypatch.setattr(supervise_module, "POLL_SECONDS", 1.0)
    assert run(job(folder, f"time.sleep(0.2)\nif rank == '1': {end}\nsys.exit(1)")) == status
    assert f"error: {said}" in capfd.readouterr().err


def test_a_crash_loop_stops(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(job(folder, "step(); sys.exit(7)")) == CRASH_LOOP
    said = capfd.readouterr().err
    assert said.count("starting again") == 3
    assert "giving up after 3 restarts without a new checkpoint; the newest checkpoint is none" in said


@pytest.mark.slow
def test_progress_starts_the_count_again(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "step()\nif rank == '0' and attempt in (1, 3): save(attempt)\nsys.exit(attempt < 5)"
    assert run(job(folder, script, restarts=2)) == 0
    assert capfd.readouterr().err.count("(1 of 2") == 3


@pytest.mark.parametrize("status", [2, 74, 143])
def test_some_ends_are_final(folder: Path, capfd: pytest.CaptureFixture[str], status: int) -> None:
    assert run(job(folder, f"step(); sys.exit({status})")) == status
    assert "again" not in capfd.readouterr().err


def test_a_crash_before_the_first_step_is_not_repeated(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(job(folder, "sys.exit(3)")) == 3
    assert "ended with status 3; see its messages above" in capfd.readouterr().err


def test_last_words_are_printed_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = json.dumps({"message": "no such corpus"})
    assert run(job(folder, f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({words!r}); sys.exit(2)")) == 2
    assert capfd.readouterr().err == "error: no such corpus\n"


LISTENING = f"""
heard = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, lambda n, f: heard.append(n))
ready()
while not heard: time.sleep(0.01)
open(f"heard.{{rank}}", "w").write(str(heard[0]))
sys.exit({STOPPED})
"""


def signal_when_ready(folder: Path, number: int, *, times: int = 1) -> None:
    """Signal this process when both workers are ready, `times` with pauses too long for echoes."""

    def later() -> None:
        while not all((folder / f"ready.{rank}.0").exists() for rank in (0, 1)):
            time.sleep(0.02)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(1.2)

    threading.Thread(target=later, daemon=True).start()


def test_a_signal_to_the_launcher_reaches_every_worker(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    signal_when_ready(folder, signal.SIGUSR1)
    assert run(job(folder, LISTENING)) == STOPPED
    assert [(folder / f"heard.{rank}").read_text() for rank in (0, 1)] == [str(int(signal.SIGUSR1))] * 2
    assert capfd.readouterr().err == "", "who started the job says what there is to continue from"


def test_a_second_signal_ends_workers_that_do_not_listen(folder: Path) -> None:
    signal_when_ready(folder, signal.SIGTERM, times=2)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(job(folder, "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)"))
    assert getattr(stopped.value, "status", 0) == 128 + signal.SIGTERM


def test_a_worker_that_a_signal_ends_before_it_can_listen_takes_the_others_along(folder: Path) -> None:
    script = "if rank == '1': os.kill(os.getpid(), signal.SIGTERM)\n" + LISTENING
    assert run(job(folder, script)) == STOPPED
    assert (folder / "heard.0").read_text() == str(int(signal.SIGTERM))


def test_whoever_keeps_nothing_is_not_told_to_resume(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = job(folder, "os.kill(os.getpid(), signal.SIGTERM)")
    assert run(replace(work, policy=replace(work.policy, run_dir=None))) == STOPPED
    assert capfd.readouterr().err == ""


def two_machines(folder: Path, scripts: list[str], stops: list[StopRequest]) -> list[int]:
    """The statuses of two machines' launchers, one rank each, that share a store."""
    store, statuses = dist.HashStore(), [-1, -1]

    def launch(node: int) -> None:
        try:
            statuses[node] = supervise(
                job(folder, scripts[node], ranks=1, store=store, node=node, nodes=2), stops[node]
            )
        except TrainingStopped as stopped:
            statuses[node] = stopped.status

    machines = [threading.Thread(target=launch, args=[node]) for node in (0, 1)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join(20)  # seconds; the limit of a meeting is 30
    return statuses


WAITING = "ready(); time.sleep(600 if attempt < 2 else 0); assert attempt == 2"


def test_the_launchers_of_two_machines_decide_alike(folder: Path) -> None:
    """One machine's worker crashes twice; the other machine's launcher restarts its own each time."""
    stop = StopRequest(raises=True)
    assert two_machines(folder, ["step(); ready(); sys.exit(attempt < 2 and 9)", WAITING], [stop, stop]) == [0, 0]
    assert (folder / "ready.0.2").exists()
    assert not (folder / "checkpoints" / checkpoint_name(1)).exists()


def test_there_is_no_restart_without_a_launcher_that_was_told_to_stop(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says so, and the other one ends at once; before, its new rank waited for `arrive_within`."""
    stops = [StopRequest(raises=True), StopRequest(raises=True)]

    def stop_the_second() -> None:
        while not (folder / "ready.0.0").exists():
            time.sleep(0.02)
        stops[1].number = signal.SIGTERM
        time.sleep(2 * POLL_SECONDS)  # until it has been forwarded
        (folder / "stopped").touch()

    threading.Thread(target=stop_the_second, daemon=True).start()
    crashing = "step()\nwhile not os.path.exists('stopped'): time.sleep(0.01)\nsys.exit(9)"
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)"
    assert two_machines(folder, [crashing, ignoring], stops) == [STUCK, 9]
    said = capfd.readouterr().err
    assert "the launcher of machine 1 on " in said
    assert "has ended; there is no restart without it" in said
    assert "starting again" not in said


def test_there_is_no_waiting_for_ranks_whose_launcher_was_ended(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a second signal, while the ranks run."""

    class Ended(StopRequest):
        def running(self) -> None:
            raise TrainingStopped(128 + signal.SIGTERM)

    stops = [StopRequest(raises=True), Ended(raises=True)]
    assert two_machines(folder, ["time.sleep(600)", ""], stops) == [STUCK, 128 + signal.SIGTERM]
    assert "the launcher of machine 1 on " in capfd.readouterr().err


def test_there_is_no_restart_without_a_launcher_that_does_not_answer(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine is down, or its cable was cut; before, new ranks waited three times for `arrive_within`."""
    monkeypatch.setattr(launchers_module, "MEET_SECONDS", 0.3)
    store = dist.HashStore()
    assert run(job(folder, "step(); ready(); sys.exit(9)", ranks=1, store=store, nodes=2)) == STUCK
    said = capfd.readouterr().err
    assert "error: rank 0 ended with status 9" in said
    assert "error: the launcher of machine 1 has ended, or has not answered for 0.3 s" in said
    assert "starting again" not in said
    assert not (folder / "ready.0.1").exists()


class Unreachable(dist.Store):
    """A store behind a cut cable."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.over.wait()

    def check(self, keys: list[str]) -> bool:
        return not self.over.wait()

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.over.wait()
        raise dist.DistError


def test_a_machine_without_network_ends_by_itself(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one limit, without an announcement of a restart."""
    monkeypatch.setattr(launchers_module, "ANSWER_SECONDS", 0.3)
    store = Unreachable()
    assert run(job(folder, "step(); sys.exit(9)", ranks=1, store=store, node=1, nodes=2)) == STUCK
    store.over.set()
    said = capfd.readouterr().err
    assert "error: the launcher of the first machine does not answer" in said
    assert "starting again" not in said


def write_all(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


LIMITED = {
    "version 2": {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "4000000000\n",
        "sys/fs/cgroup/job/memory.current": "3950000000\n",
        "sys/fs/cgroup/job/memory.stat": "file 50000000\ninactive_file 150000000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "3950000000\n",
    },
    "version 1": {
        "proc/self/cgroup": "9:name=systemd:/\n8:cpu,cpuacct:/other\n4:memory:/job/step\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000000000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "3950000000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 0\ntotal_inactive_file 150000000\n",
        "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": "3950000000\n",
    },
}
"""Control groups of 4 GB that have 0.2 GB left."""


@pytest.mark.parametrize("version", LIMITED)
def test_limits_of_control_groups_are_read(tmp_path: Path, version: str) -> None:
    meminfo = {"proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:       9000000 kB\n"}
    write_all(tmp_path, LIMITED[version] | meminfo)
    assert memory_there(tmp_path) == 4_000_000_000
    assert memory_for_files(tmp_path) == 200_000_000
    assert host_pressure(tmp_path) == "host 95% full"


@pytest.mark.parametrize("version", LIMITED)
def test_a_worker_that_the_kernel_ended_for_memory_is_told_apart(tmp_path: Path, version: str) -> None:
    """Here /proc and /sys are made up: a control group of 4 GB on a machine of 16."""
    files = {
        "proc/vmstat": "nr_free_pages 5\noom_kill 3\n",
        "proc/meminfo": "MemTotal:       16000000 kB\n",
        "proc/7/status": "Name:\tpython\nVmRSS:\t 3000000 kB\n",
        "proc/8/status": "VmRSS:\t 3900000 kB\n",
    }
    write_all(tmp_path, files | LIMITED[version])
    watch = MemoryWatch(tmp_path)
    watch.look(7)
    assert watch.explain(7) == ""
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 4\n")
    assert "most likely by the kernel because memory ran out: it held 3.1 GB of 4.0 GB; use a smaller" in watch.explain(
        7
    )
    (tmp_path / "proc/vmstat").unlink()  # an old kernel has no count, but a worker that held nearly all is evidence
    watch = MemoryWatch(tmp_path)
    watch.look(8)
    assert "it held 4.0 GB of 4.0 GB" in watch.explain(8)


def test_a_rank_that_the_kernel_killed_is_explained_and_started_again_unless_a_change_is_to_come(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher prints the page about it; with --retry-oom the run ends here, to continue with another recipe."""
    monkeypatch.setattr(MemoryWatch, "explain", lambda watch, pid: ", most likely by the kernel because memory ran out")
    monkeypatch.setattr(MemoryWatch, "of", lambda watch, pid: (3, 4))
    script = "if attempt == 0: step(); os.kill(os.getpid(), signal.SIGKILL)\n"
    options = {"ranks": 1, "explain_kill": lambda *facts: f"the page of {facts}"}
    assert run(job(folder, script, **options)) == 0
    said = capfd.readouterr().err
    assert (
        "killed by SIGKILL, most likely by the kernel because memory ran out\nthe page of (0, 3, 4)\nstarting again"
        in said
    )
    assert run(job(folder, script, **options, restarts_killed=False)) == OUT_OF_MEMORY
    assert "starting again" not in capfd.readouterr().err


def test_a_machine_that_is_nearly_full_is_told(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:       500 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/pressure/memory": "some avg10=0.00 avg60=1.00 avg300=0.00 total=5\nfull avg10=9.00 avg60=0\n",
        "sys/fs/cgroup/job/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.current": "0\n",
    }
    write_all(tmp_path, files)
    assert host_pressure(tmp_path) == ""
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:       60 kB\n")
    assert host_pressure(tmp_path) == "host 94% full"
    (tmp_path / "proc/meminfo").write_text(files["proc/meminfo"])
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("1000\n")
    (tmp_path / "sys/fs/cgroup/job/memory.current").write_text("980\n")
    (tmp_path / "sys/fs/cgroup/job/memory.stat").write_text("file 90\ninactive_file 80\n")
    (tmp_path / "proc/pressure/memory").write_text("some avg10=12.30 avg60=1.00 avg300=0.00 total=5\n")
    assert host_pressure(tmp_path) == "host 90% full, waits 12%"


def test_signals_without_a_name_are_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(job(folder, "os.kill(os.getpid(), signal.SIGRTMIN + 2)", ranks=1)) == 128 + signal.SIGRTMIN + 2
    assert "error: rank 0 was killed by SIGRTMIN+2" in capfd.readouterr().err


def test_workers_end_with_a_launcher_that_is_killed_while_they_start(tmp_path: Path) -> None:
    """Before they have loaded anything: their module would take a minute to load."""
    (tmp_path / "slow.py").write_text("import pathlib, time; pathlib.Path('ready').touch(); time.sleep(60)")
    code = (
        "import subprocess, sys, os, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'meshwright.launch.child', str(os.getpid()), 'slow'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, **pipes) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        launcher.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
