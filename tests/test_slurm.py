"""The documented Slurm script on a real Slurm: two machines on one host, stopped and requeued, lose no step.

`make test-slurm` runs it; it needs Debian's slurm-wlm and munge, and root. Everything except munge's socket is in one
folder.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (apt install slurm-wlm munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

CONFIG = """
ClusterName=trial
SlurmctldHost={host}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
NodeName={host} Port={ports[1]} CPUs={cores}
# The ranks meet at the first name in the alphabet, which must be known to the name service.
NodeName=zz NodeHostname={host} Port={ports[2]} CPUs={cores}
PartitionName=p Nodes={host},zz Default=YES State=UP
"""

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
srun --kill-on-bad-exit=0 {python} -P -m meshwright train run.yaml --resume auto --wait-for-lock 600
status=$?
if [ $status -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""

RECIPE = """
model: {family: llama, hidden: 32, num_layers: 1, num_heads: 2, vocab: 300}
data: {sources: [text.txt], sequence_length: 16, tokenizer_vocab: 300}
training: {steps: 100000, global_batch: 2}
checkpoint: {every: 100000}
layout: {dp_replicate: 2}
run_dir: run
"""


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Runs Slurm's commands on a cluster of two machines, in `tmp_path`."""
    if not request.config.getoption("--slurm"):
        pytest.skip("make test-slurm runs it")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    for name in ("state", socket.gethostname(), "zz"):
        (tmp_path / name).mkdir()
    config = tmp_path / "slurm.conf"
    config.write_text(
        CONFIG.format(host=socket.gethostname(), folder=tmp_path, ports=ports, cores=len(os.sched_getaffinity(0)))
    )
    environment = {**os.environ, "SLURM_CONF": str(config)}

    def slurm(*command: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    daemons = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (
            ("runuser", "-u", "munge", "--", "munged", "-F"),
            ("slurmctld", "-D"),
            ("slurmd", "-D", "-N", socket.gethostname()),
            ("slurmd", "-D", "-N", "zz"),
        )
    ]
    try:
        wait(lambda: "2" in slurm("sinfo", "--noheader", "--states=idle", "--format=%D"))
        yield slurm
    finally:
        for log in ("job.txt", "slurmctld.log"):  # shown where the test fails
            if (tmp_path / log).exists():
                print(f"== {log}", *(tmp_path / log).read_text().splitlines()[-40:], sep="\n")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def wait(condition: Callable[[], bool], seconds: float = 150) -> None:
    """Wait until it is true; a failing Slurm command, for example before its daemon answers, counts as false."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except subprocess.CalledProcessError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s")


def steps(run_dir: Path) -> list[int]:
    """The steps in the journal, in its order."""
    journal = run_dir / "metrics.jsonl"
    records = map(json.loads, journal.read_text().splitlines()) if journal.exists() else ()
    return [record["step"] for record in records if record["kind"] == "step"]


@pytest.mark.parametrize("stop", ["signal", "requeue"])
def test_a_stopped_job_is_requeued_and_loses_no_step(slurm: Callable[..., str], tmp_path: Path, stop: str) -> None:
    (tmp_path / "text.txt").write_text(Path(json.__file__).read_text())
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=sys.executable))
    job = slurm("sbatch", "--parsable", "--output=job.txt", "job.sh").strip()
    ends = []
    for _ in range(2):
        before = len(steps(tmp_path / "run"))
        wait(lambda before=before: len(steps(tmp_path / "run")) > before + 5)
        if stop == "signal":
            slurm("scancel", "--signal=USR1", job)
        else:
            slurm("scontrol", "requeue", job)
        wait(lambda: slurm("squeue", "--noheader", "--format=%t", "--jobs", job).strip() == "PD")
        ends.append(steps(tmp_path / "run")[-1])
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait(lambda: steps(tmp_path / "run")[-1] > ends[-1])
    slurm("scancel", job)
    said = (tmp_path / "job.txt").read_text()
    assert steps(tmp_path / "run") == list(range(1, len(steps(tmp_path / "run")) + 1))
    assert [int(step) for step in re.findall(r"continuing from .*, step (\d+)", said)] == ends
