"""Files that a user names: read only if they are files, because a reader of a pipe or a device may wait forever."""

import stat
from pathlib import Path

from meshwright.spec.errors import UserError

KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def regular(path: Path) -> Path:
    """`path`; raises `UserError` if it exists and is not a file: a pipe, a socket, a device, or a folder."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path  # its reader says why
    for is_kind, kind in KINDS:
        if is_kind(mode):
            raise UserError(f"{path} is {kind}, not a file")
    return path
