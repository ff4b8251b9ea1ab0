"""Files and folders that appear complete or not at all: written to a temporary name, flushed to disk, renamed."""

import fcntl
import glob
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.storage.lock import Lock
from meshwright.storage.sync import sync, sync_file

TEMPORARY = ".writing"
"""The end of temporary names."""


def write_durably(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace `path` with `content` in one step that survives a crash; a file with this content is left alone. `mode`:
    its permissions, less the umask.

    Raises `OSError` with the file's name if the disk is full; the old content stays.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    _remove_abandoned(path)
    try:
        temporary, file = _new_temporary(path, mode)
        with open(file, "wb") as stream:
            try:
                stream.write(content)
                sync_file(stream)
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def _new_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """A new file next to `path`, locked until it is closed.

    Where others may write, a name that they can guess may be their link to another file.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with suppress(OSError):  # not every file system supports it
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return temporary, file
        os.close(file)  # another writer has removed it before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of killed processes, which nobody locks."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        with suppress(OSError), open(os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            left.unlink()


def own_folder(path: Path) -> Path:
    """The folder `path`, made if it is missing. If it is a link, a file or another user's, it is replaced."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
            new_folder(path)
    return path


def new_folder(path: Path) -> Path:
    """The folder `path`, empty; anything else of this name is removed, and links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.mkdir()
    return path


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def complete_folder(directory: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `directory` if the block succeeds, and removed otherwise.

    If several processes want the same folder, they write one at a time. Raises `UserError` if `directory` exists.
    """
    with Lock(directory.with_name(f".{directory.name}.lock"), wait=math.inf):
        if directory.exists():
            raise UserError(f"{directory} already exists; export to another directory or remove it")
        staging = directory.with_name(f".{directory.name}.writing")
        try:
            yield new_folder(staging)  # a killed process may have left one
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a readable JSON file."""
    write_durably(path, json.dumps(value, indent=2) + "\n")
