"""Signals to running jobs, in every phase from start to last save: launcher and ranks killed, ended, or stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attack.good import RECIPE, Good, result_of
from attack.trial import SAID, Ended, Fate, Trial, copy
from attack.warm import start_warm
from meshwright.launch.forkserver import Process

LAST = 40
JOB: Mapping[str, Any] = {
    **RECIPE,
    "training": {**RECIPE["training"], "steps": LAST},
    "checkpoint": {"every": 5, "keep_last": 3},
    "layout": {"dp_shard": 2},
    "guards": {"stuck_after": 1, "arrive_within": 30},
    "run_dir": "job",
}
"""Two ranks that share the model's state."""
WORDS = ("train", "recipe.yaml", "--resume", "auto")
KILLS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LIMIT = 180.0
"""Seconds within which a job must end after a signal, on a busy machine; gloo's own limit is half an hour."""


@dataclass(frozen=True)
class Expected:
    """An undisturbed job."""

    result: str
    seconds: float
    """Seconds that a forked job takes."""
    cold_seconds: float


def job_folder(good: Good, folder: Path) -> Path:
    """A copy of the good folder with the job's recipe."""
    attacked = copy(good.folder, folder)
    (attacked / "recipe.yaml").write_text(yaml.safe_dump(dict(JOB), sort_keys=False))
    return attacked


COLD = 8
"""One of this many jobs is a new Python process, for signals that arrive while it loads."""


def start(
    folder: Path,
    name: str = "job",
    more: Mapping[str, str] | None = None,
    machine: str = "",
    *,
    cold: bool = False,
) -> Process:
    """The job in its own process group; its output goes to files next to the folder. `machine`: the network namespace
    where it runs."""
    out, err, env = folder / f"{name}.out", folder / f"{name}.err", {**os.environ, **(more or {})}
    if not cold:
        return start_warm(WORDS, cwd=folder, out=out, err=err, env=env, machine=machine)
    command = [*(("ip", "netns", "exec", machine) if machine else ()), sys.executable, "-P", "-m", "meshwright", *WORDS]
    with out.open("wb") as output, err.open("wb") as errors:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=errors, start_new_session=True, env=env)


def end(job: Process, folder: Path, name: str = "job", limit: float = LIMIT) -> Ended:
    """How the job ended; after `limit` seconds all of it is killed, and its status is None."""
    try:
        job.wait(limit)
        deadline = time.monotonic() + 15
        while members(job.pid) and time.monotonic() < deadline:  # workers that outlive the launcher
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        pass
    left = members(job.pid)
    for process in left:
        os.kill(process, signal.SIGKILL)
    status = None if left else job.wait()
    job.wait()
    read = [(folder / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
    return Ended(status, *read)


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[3]) == session and words[0] != "Z":
            found.append(int(path.parent.name))
    return found


def workers(launcher: int) -> list[int]:
    """The launcher's ranks, in order."""
    found = []
    for process in members(launcher):
        try:
            words, name = (Path(f"/proc/{process}/{file}").read_text() for file in ("cmdline", "comm"))
        except OSError:
            continue
        if process != launcher and ("meshwright.launch.child" in words or name.startswith("meshwright:")):
            found.append(process)
    return sorted(found)


def expect(good: Good, folder: Path) -> Expected:
    """Train the undisturbed job once in each way."""
    here, seconds, results = folder / "undisturbed", dict[bool, float](), set[str]()
    for cold in (True, False):
        job_folder(good, here)
        began = time.monotonic()
        ended = end(start(here, cold=cold), here)
        assert ended.status == 0, ended.err
        seconds[cold] = time.monotonic() - began
        results.add(result_of(here, "job", LAST))
    assert len(results) == 1, "forks do not train what fresh processes train"
    return Expected(results.pop(), seconds[False], seconds[True])


def signal_trial(good: Good, folder: Path, expected: Expected, seed: str) -> Trial:
    """One job, one signal."""
    draw, kind = random.Random(seed), seed.split("/", 1)[0]
    here = job_folder(good, folder / "attacked")
    cold = int(seed.rsplit("/", 1)[1]) % COLD == COLD - 1
    job = start(here, cold=cold)
    moment = draw.uniform(0.3, 1.1 * expected.cold_seconds) if cold else draw.uniform(0, 1.1 * expected.seconds)
    time.sleep(moment)
    ranks = workers(job.pid)
    if kind == "stopped rank":
        number, victims = signal.SIGSTOP, ranks[:2]
    else:
        number, victims = draw.choice(KILLS), [job.pid, *ranks]
    victim = draw.choice(victims) if victims else job.pid
    done = f"{signal.Signals(number).name} to {'the launcher' if victim == job.pid else 'a rank'} after {moment:.2f} s"
    done += ", from a fresh start" if cold else ""
    if victims and victim in members(job.pid):
        os.kill(victim, number)
    ended = end(job, here)
    fate, said = _judge(ended)
    if fate == "named" or ended.status == 0:
        again = end(start(here, "again"), here, "again")
        if again.status != 0:
            fate, said = "hang" if again.status is None else "vague", f"then: {again.out[-SAID:]}{again.err[-SAID:]}"
        else:
            same = result_of(here, "job", LAST) == expected.result
            fate, said = ("survived", "") if same else ("silent", "another result than the undisturbed job's")
    return Trial(kind, seed, done, fate, said)


def _judge(ended: Ended) -> tuple[Fate, str]:
    """The outcome of a signalled job: it must end with a status, and with a sentence if it could still print one."""
    said = f"exit {ended.status}\n{ended.out[-SAID:]}\n{ended.err[-SAID:]}"
    if ended.status is None:
        return "hang", said
    if "Traceback (most recent call last)" in ended.err:
        return "trace", said
    # Before Python has read the first line of the program, a signal ends it like any other process.
    told = ended.status == 0 or -(ended.status or 0) in KILLS or ended.err.strip()
    return ("named", "") if told else ("vague", said)
