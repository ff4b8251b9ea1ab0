"""Signals to running jobs, in every phase from start to last save: launchers and ranks killed, ended, or stopped; one
launcher for both ranks, or one for each, as on two machines."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attack.good import RECIPE, Good, result_of
from attack.trial import FAILURES, SAID, Cell, Ended, Fate, Trial, copy
from attack.warm import start_warm
from meshwright.launch.forkserver import Process
from meshwright.launch.status import STOPPED

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
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PHASES: Mapping[str, tuple[float, float]] = {"starting": (0.0, 0.3), "training": (0.3, 0.8), "ending": (0.8, 1.1)}
"""Fractions of the undisturbed job's time."""
LOADING = "loading"
"""The phase of a new Python process; else it is a fork of this one, which has loaded everything."""
LIMIT = 180.0
"""Seconds within which a job must end after a signal, on a busy machine; gloo's own limit is half an hour."""


@dataclass(frozen=True)
class Expected:
    """An undisturbed job."""

    result: str
    seconds: float
    """Seconds that a forked job takes."""
    cold: float
    """The same for a new Python process."""


def job_folder(good: Good, folder: Path) -> Path:
    """A copy of the good folder with the job's recipe."""
    attacked = copy(good.folder, folder)
    (attacked / "recipe.yaml").write_text(yaml.safe_dump(dict(JOB), sort_keys=False))
    return attacked


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


@dataclass(frozen=True)
class SignalledJob:
    """A signal to the launcher of a job, or to one of its ranks."""

    good: Good
    place: Path
    expected: Callable[[], Expected]
    name: str = "signalled job"

    def cells(self) -> Sequence[Cell]:
        """Victims in every phase, by signals; a stopped launcher never ends, so only ranks are stopped."""
        rows = [f"{who}, {phase}" for who in ("launcher", "rank 0", "rank 1") for phase in PHASES]
        found = [(row, number.name) for row in (f"launcher, {LOADING}", *rows) for number in KILLS]
        return found + [(row, signal.SIGSTOP.name) for row in rows if row.startswith("rank")]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One job, one signal."""
        (who, phase), number = cell[0].split(", "), signal.Signals[cell[1]]
        expected, here = self.expected(), job_folder(self.good, self.place / "attacked")
        cold = phase == LOADING
        job = start(here, cold=cold)
        moment = draw.uniform(*PHASES["starting" if cold else phase]) * (expected.cold if cold else expected.seconds)
        time.sleep(moment)
        ranks = workers(job.pid)
        victim = job.pid if who == "launcher" or len(ranks) < 2 else ranks[int(who[-1])]
        done = f"{number.name} to {who if victim != job.pid else 'the launcher'} after {moment:.2f} s"
        if victim != job.pid or number != signal.SIGSTOP:
            _signal(victim, number)
        ended = end(job, here)
        fate, said = _judge(ended)
        if fate == "named" or ended.status == 0:
            again = end(start(here, "again"), here, "again")
            fate, said = judge_last([again], here, expected)
        return Trial(self.name, seed, done, fate, said, cell)


@dataclass(frozen=True)
class SignalledMachine:
    """A signal to one of two launchers that share a job, or to its rank; both run on this machine."""

    good: Good
    place: Path
    expected: Callable[[], Expected]
    name: str = "one of two launchers"

    def cells(self) -> Sequence[Cell]:
        """Victims in the first phases, by signals."""
        victims = ("launcher 0", "launcher 1", "rank 0", "rank 1")
        signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
        phases = ("starting", "training")
        return [(f"{who}, {phase}", number.name) for who in victims for phase in phases for number in signals]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One job, one signal."""
        (who, phase), number = cell[0].split(", "), signal.Signals[cell[1]]
        expected, here = self.expected(), job_folder(self.good, self.place / "attacked")
        jobs = start_pair(here, "first")
        moment = draw.uniform(*PHASES[phase]) * PAIR_SLOWER * expected.seconds
        time.sleep(moment)
        job = jobs[int(who[-1])]
        ranks = workers(job.pid)
        victim = ranks[0] if who.startswith("rank") and ranks else job.pid
        done = f"{number.name} to {who} after {moment:.2f} s"
        _signal(victim, number)
        stopped = job if victim == job.pid and number == signal.SIGSTOP else None
        others = [end(other, here, f"first{rank}") for rank, other in enumerate(jobs) if other is not stopped]
        if stopped is not None:  # it cannot end, but the others must
            _signal(stopped.pid, signal.SIGKILL)
            end(stopped, here, f"first{jobs.index(stopped)}")
        told = any(one.err.strip() for one in others)  # of a stop, one launcher tells
        verdicts = [_judge(one) for one in others if not (told and one.status == STOPPED)]
        fate, said = next((verdict for verdict in verdicts if verdict[0] in FAILURES), ("named", ""))
        if fate not in FAILURES:
            again = [end(job, here, f"again{rank}") for rank, job in enumerate(start_pair(here, "again"))]
            fate, said = judge_last(again, here, expected)
        return Trial(self.name, seed, done, fate, said, cell)


PAIR_SLOWER = 1.5
"""Two launchers take about so much longer than one."""


def start_pair(
    folder: Path, name: str, *, address: str = "localhost", machines: Sequence[str] = ("", "")
) -> list[Process]:
    """The job's two launchers, one for each rank; `machines`: the network namespaces where they run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"PET_NNODES": "2", "PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port)}
    return [
        start(folder, f"{name}{rank}", {"PET_NODE_RANK": str(rank), **meeting}, machine)
        for rank, machine in enumerate(machines)
    ]


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


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


def judge_last(again: Sequence[Ended], here: Path, expected: Expected) -> tuple[Fate, str]:
    """The outcome of the job that continues: it must reach the result of an undisturbed one."""
    for ended in again:
        if ended.status != 0:
            return (
                "hang" if ended.status is None else "vague",
                f"then: exit {ended.status}\n{ended.out[-SAID:]}{ended.err[-SAID:]}",
            )
    same = result_of(here, "job", LAST) == expected.result
    return ("survived", "") if same else ("silent", "another result than the undisturbed job's")
