"""Files and folders that appear complete or not at all: written to a temporary name, flushed to disk, renamed."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.storage.lock import Lock
from meshwright.storage.sync import sync, sync_file


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace `path` with `content` in one step that survives a crash; a file with this content is left alone.

    Raises `OSError` with the file's name if the disk is full; the old content stays.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            sync_file(file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def regular(path: Path) -> Path:
    """`path`; raises `UserError` if it is a pipe or a device, on which a reader may wait forever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is a pipe or a device, not a file")
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
        shutil.rmtree(staging, ignore_errors=True)  # left by a killed process
        try:
            staging.mkdir()
            yield staging
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
