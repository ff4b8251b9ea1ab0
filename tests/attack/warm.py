"""Jobs without a start-up to wait for: launcher and ranks are forks of processes that have loaded everything.

The launcher is a fork of this process. Before it does anything it forks a nursery, which forks each rank when the
launcher asks for it: a fork of the launcher itself would have its sockets, and locks that its threads hold. Ranks are
the launcher's children all the same: whoever forks them ends at once, and orphans go to the nearest ancestor that has
asked for them.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import meshwright.launch.supervise
from meshwright.cli.main import main
from meshwright.launch.signals import end_with

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
CLONE_NEWNET = 0x40000000
RANK = "mw-rank"
"""What the kernel calls a rank."""
LARGEST = 1 << 20
"""Bytes of a rank's command and environment."""

_libc = ctypes.CDLL(None, use_errno=True)


class WarmJob:
    """A launcher, as `subprocess.Popen` has it."""

    def __init__(
        self, words: Sequence[str], *, cwd: Path, out: Path, err: Path, env: Mapping[str, str], machine: str = ""
    ) -> None:
        """`machine`: the network namespace where it runs."""
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(cwd, out, err, env, machine)
            _end_with_status(lambda: _launch(words))

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        if self.returncode is None:
            ended, code = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(code) if ended else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """See `subprocess.Popen`."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("meshwright", timeout)
            time.sleep(0.005)
        return status


class WarmRank:
    """A rank, as the launcher's `subprocess.Popen` has it."""

    nursery: socket.socket

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        # python -P -u -m meshwright.launch.child PARENT MODULE ...
        asked = json.dumps([command[command.index("-m") + 3 :], dict(env), list(pass_fds)]).encode()
        socket.send_fds(self.nursery, [asked], list(pass_fds) or [0])
        self.pid, self.returncode = int(self.nursery.recv(100)), None

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        return WarmJob.poll(self)  # type: ignore[arg-type]

    def wait(self) -> int:
        """See `subprocess.Popen`."""
        return WarmJob.wait(self)  # type: ignore[arg-type]

    def send_signal(self, number: int) -> None:
        """See `subprocess.Popen`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        self.send_signal(signal.SIGKILL)


def _become(cwd: Path, out: Path, err: Path, env: Mapping[str, str], machine: str) -> None:
    """This fork's session, place, streams and network."""
    os.setsid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(cwd)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    if machine:
        with open(f"/var/run/netns/{machine}") as namespace:
            assert _libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _launch(words: Sequence[str]) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _nurse(theirs, launcher)
    theirs.close()
    WarmRank.nursery = ours
    start: Any = WarmRank
    meshwright.launch.supervise.subprocess = _Subprocess(start)  # type: ignore[attr-defined]
    return main(list(words))


class _Subprocess:
    """The module `subprocess`, as far as the supervisor uses it."""

    def __init__(self, start: Any) -> None:
        self.Popen = start


def _nurse(asking: socket.socket, launcher: int) -> None:
    """Fork a rank for whoever asks, for ever."""
    while True:
        asked, handles, _, _ = socket.recv_fds(asking, LARGEST, 8)
        if not asked:
            os._exit(0)
        words, env, numbers = json.loads(asked)
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank:
                os.write(write, str(rank).encode())
                os._exit(0)
            for number, handle in zip(numbers, handles, strict=False):
                os.dup2(handle, number)
            asking.close()
            _end_with_status(lambda words=words, env=env: _work(words, env, launcher))
        os.waitpid(middle, 0)
        asking.send(os.read(read, 100))
        for handle in (*handles, read, write):
            os.close(handle)


def _work(words: Sequence[str], env: Mapping[str, str], launcher: int) -> int:
    """What `meshwright.launch.child` does."""
    _libc.prctl(PR_SET_NAME, RANK.encode(), 0, 0, 0)
    while os.getppid() != launcher:
        time.sleep(0.001)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with(launcher)
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


def _end_with_status(work: Any) -> None:
    """Do it, and end this fork as a program ends."""
    status = 1
    try:
        status = work()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
