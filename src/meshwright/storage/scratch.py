"""Temporary folders that are cleaned up: later processes remove the folders of killed ones."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "meshwright-"
OWNER = ".owner"
"""A file that a folder's owner holds `flock` on while it lives; process ids would be ambiguous in containers that share
a temporary directory."""

ABANDONED = ".abandoned"
"""A file left in the folder by the first process that finds the owner dead."""
GRACE = 60.0
"""Seconds after that in which processes started by the owner may still read."""


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder in the system's temporary directory, `meshwright-PURPOSE-...`, removed after the block. Also removes
    this user's folders whose owner was found dead more than a minute ago."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    made = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{purpose}-", ignore_cleanup_errors=True)
    with made as name, (Path(name) / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(where: Path) -> None:
    for folder in where.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or is being removed
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / OWNER).open() as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mark = folder / ABANDONED
                if not mark.exists():
                    mark.touch()
                elif time.time() - mark.stat().st_mtime > GRACE:
                    shutil.rmtree(folder)
