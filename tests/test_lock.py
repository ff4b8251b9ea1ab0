"""One owner at a time, whatever dies, stops or returns, even if file locks do not reach other machines."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.storage import lock
from meshwright.storage.lock import Lock, LockedError

PROGRAM = """
import fcntl, json, os, random, sys, time
from pathlib import Path
from meshwright.storage import lock
path, machine, flock = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "flock"
lock.BEAT, lock.LEASE, lock.LOOK = 0.05, 1.0, 0.01
lock._boot = lambda: machine  # what processes of one machine share
if not flock:
    def refused(*_): raise OSError
    lock.fcntl.flock = refused
def lost(text): print("lost", text, flush=True); os._exit(3)
def owning(wait=float("inf")): return lock.Lock(path, wait=wait, say=lambda text: print(text, flush=True), lost=lost)
"""
"""A process on a machine of this name, whose file locks reach its own processes, or do not exist."""

OWN = PROGRAM + "with owning(): print('mine', flush=True); sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs; all end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *words: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **pipes | options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_owner_is_refused_and_told_who_is_the_first(tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with (
        Lock(tmp_path / "a/b/.lock"),
        pytest.raises(LockedError, match=rf"a/b is in use by process {os.getpid()} on .* since 20.*; try"),
        Lock(tmp_path / "a/b/.lock", hint="; try another"),
    ):
        pass
    with Lock(tmp_path / "a/b/.lock"):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_who_waits_gets_it_next(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    first = start(OWN, tmp_path / ".lock", "m", "flock")
    assert said(first) == "mine"
    second = start(OWN, tmp_path / ".lock", "m", "flock")
    assert said(second).startswith(f"{tmp_path} is in use by process {first.pid} on ")
    first.communicate("")
    assert said(second) == "mine"


@pytest.mark.parametrize("machine", ["m", "another"])
@pytest.mark.parametrize("flock", ["flock", "none"])
def test_a_dead_owner_is_followed_at_once_on_its_machine_and_after_a_lease_elsewhere(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], machine: str, flock: str
) -> None:
    first = start(OWN, tmp_path / ".lock", "m", flock)
    assert said(first) == "mine"
    first.kill()
    first.wait()
    killed = time.time()
    second = start(OWN, tmp_path / ".lock", machine, flock)
    while (line := said(second)) != "mine":
        assert "waiting for it to end, or a sign of life" in line
    taken = max(path.stat().st_ctime for path in tmp_path.glob(".lock-*"))
    assert [path.name for path in tmp_path.iterdir()] == [".lock-2"]
    if (machine, flock) != ("m", "flock"):
        assert taken - killed > 0.8  # its last heartbeat may be up to one interval old


def test_a_lock_is_not_free_before_the_owners_workers_have_ended(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    code = PROGRAM + (
        "import subprocess\n"
        "with owning() as mine:\n"
        "    child = subprocess.Popen(['sleep', '600'], pass_fds=[mine.inherited])\n"
        "    print(child.pid, flush=True); sys.stdin.read()\n"
    )
    first = start(code, tmp_path / ".lock", "m", "flock")
    worker = int(said(first))
    first.kill()
    first.wait()
    second = start(OWN, tmp_path / ".lock", "m", "flock")
    try:
        assert "is in use by" in said(second)
        time.sleep(0.3)
        assert [path.name for path in tmp_path.iterdir()] == [".lock-1"]
    finally:
        os.kill(worker, signal.SIGKILL)
    assert said(second) == "mine"


@pytest.mark.parametrize("machine", ["m", "another"])
def test_an_owner_that_lives_is_not_waited_for_unless_told(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], machine: str
) -> None:
    """Without file locks, a process on another machine is known to be alive by its next heartbeat."""
    first = start(OWN, tmp_path / ".lock", "m", "flock" if machine == "m" else "none")
    assert said(first) == "mine"
    code = PROGRAM + "try:\n    with owning(0): pass\nexcept lock.LockedError as error: print(error, flush=True)"
    second = start(code, tmp_path / ".lock", machine, "flock" if machine == "m" else "none")
    assert f"is in use by process {first.pid}" in said(second)
    assert [path.name for path in tmp_path.iterdir()] == [".lock-1"]


def test_an_owner_that_was_taken_for_dead_is_told_that_it_has_lost(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(OWN, tmp_path / ".lock", "m", "none")
    assert said(first) == "mine"
    first.send_signal(signal.SIGSTOP)
    second = start(OWN, tmp_path / ".lock", "another", "none")
    while said(second) != "mine":
        pass
    first.send_signal(signal.SIGCONT)
    assert said(first).startswith(f"lost {tmp_path} was taken over by process {second.pid} on ")
    assert first.wait(10) == 3
    assert [path.name for path in tmp_path.iterdir()] == [".lock-2"]


def test_the_clock_of_a_file_system_is_read_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed meanwhile leaves no file."""
    try:
        os.close(os.open(tmp_path, os.O_WRONLY | os.O_TMPFILE))
    except OSError:
        pytest.skip("this file system has no files without a name")
    names, fstat = [], os.fstat

    def seen(file: int) -> os.stat_result:
        names.append(os.listdir(tmp_path))
        return fstat(file)

    monkeypatch.setattr(os, "fstat", seen)
    now = lock._now(tmp_path / ".lock-1")
    assert names == [[]]
    assert abs(now / 1e9 - time.time()) < 60


@pytest.mark.parametrize("flock", ["flock", "none"])
def test_never_two(tmp_path: Path, start: Callable[..., subprocess.Popen[str]], flock: str) -> None:
    """Six processes on two machines take turns, some are killed; each records when it had the lock."""
    code = PROGRAM + (
        "notes, draw = open(sys.argv[4], 'a', buffering=1), random.Random(os.getpid())\n"
        "for _ in range(5):\n"
        "    with owning():\n"
        "        notes.write(f'{time.monotonic()} begin {os.getpid()}\\n'); time.sleep(draw.uniform(0, 0.02))\n"
        "        notes.write(f'{time.monotonic()} end {os.getpid()}\\n')\n"
        "    time.sleep(draw.uniform(0, 0.02))\n"
    )
    (tmp_path / "run").mkdir()
    notes, draw = tmp_path / "notes", random.Random(0)
    words = (tmp_path / "run/.lock", "m", flock, notes)
    processes = [start(code, *words, stdout=subprocess.DEVNULL) for _ in range(6)]
    for process in processes[:2]:
        time.sleep(draw.uniform(0.2, 0.5))
        process.kill()
    assert [process.wait(100) for process in processes[2:]] == [0] * 4
    holder, turns = "", 0
    for line in notes.read_text().splitlines():
        _, what, pid = line.split()
        if what == "begin":
            dead = {str(process.pid) for process in processes[:2]}
            assert not holder or holder in dead, f"{pid} began while {holder} was at it"
            holder, turns = pid, turns + 1
        else:
            assert holder == pid
            holder = ""
    assert turns >= 20
    assert not list((tmp_path / "run").iterdir()), json.dumps([str(path) for path in tmp_path.rglob("*")])
