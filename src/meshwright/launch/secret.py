"""The secret of a run; ranks use it to sign the objects that they send each other (`comm/objects.py`).

On one machine the launcher passes it to the workers in their environment. On several, rank 0 writes it into the run
directory, which every machine sees and only this user can read.
"""

import os
import secrets
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.storage.sync import sync

FILE = ".secret"
SECRET_BYTES = 32


def new_secret() -> str:
    """A new secret, as text for an environment variable."""
    return secrets.token_hex(SECRET_BYTES)


def write_secret(run_dir: Path) -> None:
    """Write a new secret into the run directory, before any other rank can read it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f"{FILE}.writing"
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_secret())
        file.flush()
        sync(file.fileno())
    temporary.rename(run_dir / FILE)


def read_secret(run_dir: Path) -> bytes:
    """The secret that rank 0 has written; raises `UserError` if this rank cannot read it."""
    try:
        return (run_dir / FILE).read_bytes()
    except OSError as error:
        raise UserError(
            f"{run_dir / FILE}, written by rank 0, cannot be read here ({error.strerror}); run_dir must be the same "
            "folder on every machine, and belong to the same user"
        ) from error
