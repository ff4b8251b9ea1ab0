"""The one place that publishes a checkpoint: written aside, checked by manifest, made visible by one rename.

The order of a publication, each step on disk before the next: shards and `trainer.json` in a hidden folder, then
`manifest.json` with the size and sha256 of every file, then the folder's final name, then `latest`, then the removal of
old checkpoints. A process killed anywhere leaves the last good checkpoint untouched.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LATEST = "latest"
PREFIX = "step-"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the file's name and what to do."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints below `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.name.startswith(PREFIX) and path.is_dir())


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


def publish(staging: Path, root: Path, step: int, files: dict[str, dict[str, Any]], *, keep_last: int) -> Path:
    """Give the complete checkpoint in `staging` its manifest and its name; returns the published folder."""
    write_durably(staging / MANIFEST, json.dumps({"format": 1, "step": step, "files": files}, indent=1))
    sync_folder(staging)
    final = root / checkpoint_name(step)
    if final.exists():  # the same step saved again, after a resume from an older checkpoint
        replaced = root / f".replaced-{final.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        staging.rename(final)
        shutil.rmtree(replaced)
    else:
        staging.rename(final)
    sync_folder(root)
    write_durably(root / LATEST, final.name + "\n")
    for old in list_checkpoints(root)[:-keep_last]:
        if old != final:
            shutil.rmtree(old)
    return final


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; raises `CheckpointError` where it is missing or unreadable."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = manifest["files"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: missing, so this checkpoint was never completed; {_others(checkpoint)}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not a manifest; {_others(checkpoint)}") from None
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {name!r} is not a plain file name; {_others(checkpoint)}")
    return manifest


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compare `files` (name -> bytes, sha256) with what is on disk; raises `CheckpointError` where they differ."""
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {_others(checkpoint)}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes, but {expected['bytes']} were saved; {_others(checkpoint)}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CheckpointError(f"{path}: damaged, its sha256 is not the saved one; {_others(checkpoint)}")


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


def _others(checkpoint: Path) -> str:
    others = [path.name for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
    if not others:
        return "there is no other checkpoint beside it"
    return f"to continue from {others[-1]} instead, move {checkpoint.name} away"
