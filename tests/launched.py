"""The program as a process, and a launcher's processes, from Linux's /proc."""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.launch import forkserver

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher has forked, in start order."""
    return [pid for pid in children_of(launcher) if Path(f"/proc/{pid}/comm").read_text().startswith("meshwright:")]


def children_of(process: int) -> list[int]:
    """Process ids of a process's children, in start order."""
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """The addresses, in hexadecimal, and ports at which these processes accept TCP connections."""
    sockets = {
        os.readlink(link).removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and os.readlink(link).startswith("socket:[")
    }
    found = set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in sockets:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


class Program:
    """`meshwright WORDS...` in its own process group, as a shell starts it, but as a fork of a process that has loaded
    everything. `stdout`, `stderr`: its streams, as text."""

    def __init__(self, *words: str, cwd: Path | str = ".", env: Mapping[str, str] | None = None) -> None:
        reading, writing = zip(os.pipe(), os.pipe(), strict=True)
        command = [sys.executable, "-P", "-u", "-m", "meshwright", *words]
        self._process = forkserver.start(command, env=env, cwd=cwd, stdout=writing[0], stderr=writing[1])
        os.setpgid(self.pid, self.pid)
        for end in writing:
            os.close(end)
        self.stdout, self.stderr = (open(end) for end in reading)  # noqa: SIM115

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        """End it if it is running."""
        self.kill()
        self._process.wait()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """The rest of both streams, after it has ended."""
        with ThreadPoolExecutor(2) as readers:
            rest = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return rest[0].result(), rest[1].result()


def run_program(*words: str, cwd: Path | str = ".", env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Status, output and errors of `meshwright WORDS...`."""
    with Program(*words, cwd=cwd, env=env) as program:
        out, errors = program.communicate(timeout=300)
        assert program.returncode is not None
        return program.returncode, out, errors
