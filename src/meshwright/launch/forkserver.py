"""The fork server: a process that has loaded torch and this program, and forks workers (Linux, without GPUs).

Loading takes five seconds of a core, and is done once instead of once per worker and restart. A worker is a child of
the process that requested it, as if `subprocess.Popen` had started it: the server forks a process that forks the worker
and exits, and Linux reparents the orphan to its nearest ancestor that is a subreaper (prctl(2)). CUDA does not survive
a fork, so on machines with GPUs workers are started as new processes.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from meshwright.devices import accelerator_is_here
from meshwright.launch.signals import STOP_SIGNALS

LOADED = (
    *("torch._dynamo", "torch.distributed.fsdp"),
    *("meshwright.trainer.run", "meshwright.prove.locate", "meshwright.rehearse.fake", "meshwright.rehearse.shorten"),
)
"""Modules that every worker would load."""
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
"""Constants of <linux/prctl.h>."""
READ_AT_LOAD = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_"),
    *("PYTHON", "TORCH", "PYTORCH_", "ATEN_"),
)
"""Prefixes of variables that libraries read while they load: workers whose values differ use different servers."""
READ_LATER = ("OMP_NUM_THREADS", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR")
"""Prefixes of those that are read later. PyTorch itself sets the last when its compiler loads."""
MOST_DESCRIPTORS = 16


Process: TypeAlias = "Forked | subprocess.Popen[bytes]"
"""A started process."""


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = ".",
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> Process:
    """Start `command`, which is `python -P -u -m MODULE WORDS...`, like `subprocess.Popen`: by a fork if this machine
    supports it, else as a new process.

    A fork has the resource limits, CPU affinity and umask that this process had when the server started, and /dev/null
    for any standard stream that is closed in this process.
    """
    env = os.environ if env is None else env
    if can_fork():
        descriptors = {0: None, 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        mapped = {number: number if given is None else given for number, given in descriptors.items()}
        mapped = {number: ours for number, ours in mapped.items() if number > 2 or _is_open(ours)}
        words = command[command.index("-m") + 1 :]
        with contextlib.suppress(OSError):  # the server was killed
            return _server_with(env).fork(words, env, os.path.abspath(cwd), mapped)
    return subprocess.Popen(command, env=env, cwd=cwd, pass_fds=pass_fds, stdout=stdout, stderr=stderr)


def fork_here() -> None:
    """Make the server by a fork of this process, so that it need not load everything itself.

    Only for a process that has computed nothing yet: torch's threads do not survive a fork.
    """
    key = _read_at_load(os.environ)
    if key not in _servers and can_fork() and threading.active_count() == 1:
        _load()
        _servers[key] = _Server.of_this_process()


def can_fork() -> bool:
    """Whether workers may be forks here."""
    if sys.platform != "linux":
        return False

    return not accelerator_is_here()


def _load() -> None:
    for module in LOADED:
        importlib.import_module(module)


def _read_at_load(env: Mapping[str, str]) -> str:
    return json.dumps(
        {name: env[name] for name in sorted(env) if name.startswith(READ_AT_LOAD) and not name.startswith(READ_LATER)}
    )


def _server_with(env: Mapping[str, str]) -> "_Server":
    """This process's server whose libraries were loaded with the same variables."""
    with _lock:
        key = _read_at_load(env)
        if key in _servers and not _servers[key].serves:
            _servers.pop(key).end()
        if key not in _servers:
            _servers[key] = _Server.afresh(env)
        return _servers[key]


@dataclass
class _Server:
    """The fork server, seen from its parent. It exits with its parent."""

    process: Process
    connection: socket.socket
    turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def afresh(cls, env: Mapping[str, str]) -> "_Server":
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-u", "-m", __name__, str(theirs.fileno())]
        nowhere = subprocess.DEVNULL
        with theirs:
            handed = [theirs.fileno()]
            process = subprocess.Popen(command, env=env, pass_fds=handed, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            return cls(process, ours)

    @classmethod
    def of_this_process(cls) -> "_Server":
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if not pid:
            ours.close()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            _serve(theirs)
        theirs.close()
        return cls(Forked(pid), ours)

    def fork(self, words: Sequence[str], env: Mapping[str, str], cwd: str, descriptors: Mapping[int, int]) -> "Forked":
        """A fork that runs `python -m words...` with these variables, in this folder; `descriptors`: its number of each
        file descriptor -> ours. Raises `OSError` if the server has ended."""
        request = json.dumps([list(words), dict(env), cwd, list(descriptors)]).encode()
        with self.turn:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [len(request).to_bytes(8)], list(descriptors.values()))
                self.connection.sendall(request)
                answer = _received(self.connection, 8)
            except BaseException:  # such as Ctrl-C: the next request would read this one's answer
                self.connection.close()
                raise
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        return Forked(int.from_bytes(answer))

    @property
    def serves(self) -> bool:
        """Whether it accepts requests for forks."""
        return self.connection.fileno() >= 0 and self.process.poll() is None

    def end(self) -> None:
        """End the server; its forks keep running."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


_servers: dict[str, _Server] = {}
_lock = threading.Lock()


@atexit.register
def _end() -> None:
    for server in _servers.values():
        server.end()
    _servers.clear()


class Forked:
    """A child process made by the fork server, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | Any = None
        """Its exit status, or the negative number of the signal that killed it; None while it runs."""

    def poll(self) -> int | None:
        """Its status if it has ended, else None."""
        if self.returncode is None:
            ended, code = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(code) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(0.002)
        return status

    def send_signal(self, sig: int) -> None:
        """Send it a signal if it is still running."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _received(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the fork server has ended")
        parts += part
    return parts


def _serve(connection: socket.socket) -> NoReturn:
    """Fork on request until the parent has ended. In a fork it does not return either."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    _prctl(PR_SET_NAME, b"forkserver")
    _load()
    gc.collect()
    gc.freeze()  # no collection copies the pages that all forks share
    while True:
        header, received, _, _ = socket.recv_fds(connection, 8, MOST_DESCRIPTORS)
        if not header:
            os._exit(0)
        words, env, folder, numbers = json.loads(_received(connection, int.from_bytes(header)))
        read, write = os.pipe()
        middle = _fork()
        if not middle:
            middle = os.getpid()
            if worker := _fork():
                os.write(write, worker.to_bytes(8))
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            for descriptor in (read, write):
                os.close(descriptor)
            connection.close()
            _become(env, folder, dict(zip(numbers, received, strict=True)), before)
            _run_module(words)
        os.waitpid(middle, 0)
        connection.sendall(os.read(read, 8))
        for descriptor in (*received, read, write):
            os.close(descriptor)


def _run_module(words: list[str]) -> NoReturn:
    """Run `python -m words...`, and end this fork with its status."""
    sys.argv[:], status = words, 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS has threads, and handles forks
        return os.fork()


def _become(
    env: Mapping[str, str], folder: str, descriptors: Mapping[int, int], handlers: Mapping[signal.Signals, Any]
) -> None:
    """Give this fork the variables, folder, file descriptors (number -> received as), signal handlers and seeds of a
    new process."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    above = max(descriptors, default=0) + 1
    copies = {number: fcntl.fcntl(received, fcntl.F_DUPFD, above) for number, received in descriptors.items()}
    for received in descriptors.values():
        os.close(received)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    global _fresh
    _fresh = True
    random.seed()
    np.random.seed()
    if "OMP_NUM_THREADS" in env:
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    name = f"meshwright:{env['RANK']}" if "RANK" in env else "meshwright"
    _prctl(PR_SET_NAME, name[:15].encode())


def untouched() -> bool:
    """Whether this process has certainly computed nothing yet: torch is not loaded, or it is a new fork."""
    return "torch" not in sys.modules or _fresh


_fresh = False


if __name__ == "__main__":
    from meshwright.launch import forkserver  # this module again, under the name that others import

    forkserver._serve(socket.socket(fileno=int(sys.argv[1])))
