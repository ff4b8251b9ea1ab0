"""Storage faults: a process stopped between two file operations, or slow storage."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.storage.sync import SYNC

AUDITED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
"""Python's audit events for operations that change files; `SYNC` is the event of a flush to disk."""


def run_in_fork(work: Callable[[], Any], *, die_at: int | None = None, below: Path | None = None) -> int:
    """Run `work` in a forked child and return its exit status, 0 if it returned.

    With `die_at`, the child ends abruptly (as by kill -9, status 9) right before its `die_at`-th file operation,
    counted from 0, below the folder `below`.
    """
    child = os.fork()
    if child == 0:
        try:
            if die_at is not None:
                assert below is not None
                before_file_operations(below, lambda count: os._exit(9) if count == die_at else None)
            work()
        except BaseException:  # a child never returns into its parent's frames
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def before_file_operations(below: Path, hook: Callable[[int], object]) -> None:
    """Call `hook` with a running number before each file operation below a folder, for the rest of the process."""
    count = -1
    prefix = str(below)

    def count_one() -> None:
        nonlocal count
        count += 1
        hook(count)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event in AUDITED else None
        if event == SYNC or (isinstance(path, str | os.PathLike) and str(path).startswith(prefix)):
            count_one()

    sys.addaudithook(audit)


def slow_storage(below: Path, seconds: float) -> None:
    """Delay every file operation below a folder, for the rest of the process."""
    before_file_operations(below, lambda count: time.sleep(seconds))
