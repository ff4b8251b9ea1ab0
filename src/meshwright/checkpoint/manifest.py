"""The one place that publishes a checkpoint: written aside, checked by manifest, made visible by one rename.

The order of a publication, each step on disk before the next: shards, index and `trainer.json` in a hidden folder, then
`manifest.json` with the size and sha256 of every file, then the folder's final name, then `latest`; only then do old
checkpoints go (`retention.py`). A process killed anywhere leaves the last good checkpoint untouched.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
"""Everything of a checkpoint that is no tensor."""
LATEST = "latest"
PREFIX = "step-"
STAGING = ".writing-"
"""Prefix of folders that are not yet checkpoints."""
ABANDONED = "abandoned-"
"""Prefix of checkpoints beyond the step that a run went back to: kept for people, never continued from."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the file's name and what to do."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"{PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def list_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints below `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if path.name.removeprefix(PREFIX).isdecimal() and path.is_dir()), key=step_of
    )


def latest_checkpoint(root: Path) -> Path:
    """The newest published checkpoint; raises `CheckpointError` where there is none."""
    published = list_checkpoints(root)
    if not published:
        raise CheckpointError(f"{root}: no checkpoint to continue from; start without --resume")
    return published[-1]


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file, which is flushed to disk on the way."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def publish(
    staging: Path, root: Path, step: int, files: dict[str, dict[str, Any]], *, since: int | None = None
) -> Path:
    """Give the complete checkpoint in `staging` its manifest and its name; returns the published folder.

    A run that went back to an older checkpoint, that of step `since`, takes another way from there: what lies beyond it
    is renamed. Of what was abandoned twice at one step, the last stays. None: what lies at `step` or beyond.
    """
    write_durably(staging / MANIFEST, json.dumps({"format": 1, "step": step, "files": files}, indent=1))
    sync_folder(staging)
    final = root / checkpoint_name(step)
    kept = step - 1 if since is None else since
    for later in list_checkpoints(root):
        if step_of(later) > kept:
            aside = root / f"{ABANDONED}{later.name}"
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)
    staging.rename(final)
    sync_folder(root)
    write_durably(root / LATEST, final.name + "\n")
    return final


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; raises `CheckpointError` where it is missing or unreadable."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = manifest["files"]
        names = [Path(name).name for name in files]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, so this checkpoint was never completed") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not a manifest") from None
    for name, plain in zip(files, names, strict=True):
        if plain != name:
            raise CheckpointError(f"{path}: {name!r} is not a plain file name")
    return manifest


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compare `files` (name -> bytes, sha256) with what is on disk; raises `CheckpointError` where they differ."""
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes, but {expected['bytes']} were saved")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CheckpointError(f"{path}: damaged, its sha256 is not the saved one")


def verify_no_foreign_files(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Raise `CheckpointError` where the folder holds a file that the manifest does not name."""
    for path in sorted(checkpoint.iterdir()):
        if path.name != MANIFEST and path.name not in manifest["files"]:
            raise CheckpointError(f"{path}: not part of this checkpoint; remove it to continue")


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step that survives a crash."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
