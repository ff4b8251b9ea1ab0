"""A launcher's processes, as Linux shows them."""

import os
from pathlib import Path

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher has forked, in the order of their start."""
    return [pid for pid in children_of(launcher) if Path(f"/proc/{pid}/comm").read_text().startswith("meshwright:")]


def children_of(process: int) -> list[int]:
    """Process ids of a process's children, in the order of their start."""
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
