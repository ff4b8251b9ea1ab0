"""A job without start-up time: its launcher is a fork of this process, which has loaded everything, and its ranks are
forks of the fork server that the launcher starts first."""

import ctypes
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.launch import forkserver

CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def start_warm(
    words: Sequence[str], *, cwd: Path, out: Path, err: Path, env: Mapping[str, str], machine: str = ""
) -> forkserver.Forked:
    """Run `meshwright words...`; `machine`: the network namespace where it runs."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _become(cwd, out, err, env, machine)
        _end_with_status(lambda: _launch(words))
    return forkserver.Forked(pid)


def _become(cwd: Path, out: Path, err: Path, env: Mapping[str, str], machine: str) -> None:
    """Set this fork's session, folder, streams and network."""
    os.setsid()
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
    forkserver.fork_here()
    return main(list(words))


def _end_with_status(work: Any) -> None:
    """Run it, and end this fork as a program ends."""
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
