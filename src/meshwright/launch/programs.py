"""Ranks of a program that takes turns with others on this machine: between turns, all wait for a line of input."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.launch.launcher import rank_environments
from meshwright.launch.memory import field_of
from meshwright.spec.errors import UserError

LOOK_EVERY = 0.01
"""Seconds between polls for the end of a turn."""

COMPILERS = ("ninja", "cc1plus", "nvcc", "cicc", "ptxas", "clang++")
"""Processes that build a program's operators, by the names in /proc."""

PR_SET_PDEATHSIG = 1
"""Linux's `prctl` option: the signal that a process receives when its parent ends (`linux/prctl.h`)."""


class ProgramError(UserError):
    """A program ended or hung before its turn was complete."""


class NoStepError(ProgramError):
    """A program made no step for too long."""


class RankedProgram:
    """The processes of one program, one per rank. Use it in `with`, which ends them. On Linux they also end with this
    process, even if it crashes."""

    def __init__(self, command: Sequence[str], ranks: int, log: Path) -> None:
        """Start `command` once per rank, like torchrun; their output goes to `log`."""
        self.log, self.began = log, time.time()
        with log.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_end_with_parent(os.getpid()),
                )
                for environment in rank_environments(ranks)
            ]

    def go_on(self) -> None:
        """Make every rank compute up to its next pause."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; the next poll reports it
                process.stdin.write(b"\n")
                process.stdin.flush()

    def wait_for(self, journal: Path, sign: bytes, seconds: float) -> None:
        """Wait until a whole line of `journal` contains `sign`.

        Raises `ProgramError` if a rank ends first, or `journal` does not grow for `seconds`. The time in which a rank
        compiles operators, as DeepSpeed does on first use, does not count.
        """
        size, deadline = -1, time.monotonic() + seconds
        while True:
            ended = [process.poll() for process in self._processes]
            content = journal.read_bytes() if journal.exists() else b""
            if any(sign in line for line in content.split(b"\n")[:-1]):
                return
            if any(status is not None for status in ended):
                raise ProgramError(self._explain(ended))
            if len(content) != size:
                size, deadline = len(content), time.monotonic() + seconds
            if time.monotonic() > deadline and self._compiles():
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                lines = self._lines()[-1:] or ["it printed nothing"]
                raise NoStepError(
                    f"no step within {seconds:g} s, so the program was ended: {lines[0]} (output: {self.log})"
                )
            time.sleep(LOOK_EVERY)

    def _compiles(self) -> bool:
        """Whether a rank's session has a compiler; false if there is no /proc."""
        sessions = {process.pid for process in self._processes}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
                if name in COMPILERS and int(rest.split()[3]) in sessions:
                    return True
        return False

    def peak_bytes(self) -> int:
        """The largest peak memory of any rank; 0 if there is no /proc."""
        return max(1024 * field_of(Path(f"/proc/{process.pid}/status"), "VmHWM:") for process in self._processes)

    def _explain(self, statuses: Sequence[int | None]) -> str:
        rank, status = next((rank, status) for rank, status in enumerate(statuses) if status is not None)
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = self._lines()
        message = next(
            (line for line in reversed(lines) if "Error" in line), lines[-1] if lines else ("it printed nothing")
        )
        return f"rank {rank} ended {how}: {message} (output: {self.log})"

    def _lines(self) -> list[str]:
        """The lines that the ranks have printed."""
        return [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]

    def close(self) -> None:
        """End every process and its children."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def __enter__(self) -> "RankedProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """A function for a forked child to call before its program starts: the kernel kills it when `parent` ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        return None

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before prctl was called
            os._exit(1)

    return ask_kernel
