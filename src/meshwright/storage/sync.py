"""Flushes open files to disk, after an audit event."""

import os
import sys
from typing import IO, Any

SYNC = "meshwright.sync"
"""The audit event before a flush; Python audits its own file operations, but not `os.fsync`."""


def sync(descriptor: int) -> None:
    """Flush an open file to disk, after the audit event `SYNC`. Raises `OSError` like `os.fsync`."""
    sys.audit(SYNC, descriptor)
    os.fsync(descriptor)


def sync_file(file: IO[Any]) -> None:
    """Flush an open file's buffer, then the file."""
    file.flush()
    sync(file.fileno())
