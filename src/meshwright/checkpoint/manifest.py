"""Publication of a checkpoint: written to a hidden folder, checksummed in a manifest, made visible by one rename.

The order of a publication, each step on disk before the next: shards, index and `trainer.json` in a hidden folder;
`manifest.json` with the size and sha256 of every file; the folder's final name; `latest`. Only then are old checkpoints
removed (`prune`). A process killed at any point leaves the last good checkpoint intact.
"""

import hashlib
import json
import math
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.durable import sync_folder, write_durably
from meshwright.storage.sync import sync

MANIFEST = "manifest.json"
FORMAT = 1
TRAINER = "trainer.json"
"""File with everything in a checkpoint that is not a tensor."""
LATEST = "latest"
BEST = "best"
HELD_OUT_LOSS = "held_out_loss"
"""Key of `trainer.json`: the loss measured right before the checkpoint was saved, or None."""
PREFIX = "step-"
STEP = re.compile(rf"{PREFIX}\d{{8,}}")
"""Full names of checkpoints."""
STAGING = ".writing-"
"""Prefix of folders that are not yet checkpoints."""
UNFINISHED = re.compile(rf"{re.escape(STAGING)}{PREFIX}\d{{8,}}-[0-9a-f]{{8}}")
"""Full names of such folders, from interrupted saves and removals."""
ABANDONED = "abandoned-"
"""Prefix of checkpoints after the step that a run went back to: kept for users, never resumed from."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used, with the file's name and what to do."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"{PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(ABANDONED).removeprefix(PREFIX))


def list_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints below `root`, oldest first: folders named `step-N`, good or damaged."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if STEP.fullmatch(path.name) and path.is_dir()), key=step_of)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint if it is ours: a folder with a manifest, not a link.

    It is renamed first, so that an interrupted removal leaves no folder that looks like a checkpoint.
    """
    if (checkpoint / MANIFEST).is_file() and not checkpoint.is_symlink():
        aside = checkpoint.with_name(f"{STAGING}{checkpoint_name(step_of(checkpoint))}-{secrets.token_hex(4)}")
        checkpoint.rename(aside)
        shutil.rmtree(aside)


def latest_checkpoint(root: Path) -> Path:
    """The newest published checkpoint; raises `CheckpointError` if there is none."""
    published = list_checkpoints(root)
    if not published:
        raise CheckpointError(f"{root}: no checkpoint to continue from; start without --resume")
    return published[-1]


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file, which is also flushed to disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        sync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def publish(
    staging: Path, root: Path, step: int, files: dict[str, dict[str, Any]], *, since: int | None = None
) -> Path:
    """Give the complete checkpoint in `staging` its manifest and its name; returns the published folder.

    If the run resumed from an older checkpoint, of step `since`, later checkpoints no longer belong to it and are
    renamed; of two abandoned at the same step, the last is kept. `since` None: checkpoints at `step` or later.
    """
    write_durably(staging / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    sync_folder(staging)
    final = root / checkpoint_name(step)
    kept = step - 1 if since is None else since
    for later in list_checkpoints(root):
        if step_of(later) > kept:
            aside = root / f"{ABANDONED}{later.name}"
            remove_checkpoint(aside)
            while aside.is_symlink() or aside.exists():  # not ours, so it stays
                aside = aside.with_name(f"{aside.name}-")
            later.rename(aside)
    staging.rename(final)
    sync_folder(root)
    return final


def point_at(checkpoint: Path) -> None:
    """Write the name of the newest checkpoint into `latest`, for users and scripts."""
    write_durably(checkpoint.with_name(LATEST), checkpoint.name + "\n")


def prune(root: Path, spec: CheckpointSpec) -> None:
    """Name the best checkpoint in `best`, then remove checkpoints that `spec` does not keep, and unfinished saves."""
    published = list_checkpoints(root)
    kept = set(published[-spec.keep_last :])
    if spec.keep_every:
        kept |= {path for path in published if step_of(path) % spec.keep_every == 0}
    if spec.keep_best:
        ranked = sorted((loss, path) for path in published if (loss := held_out_loss(path)) is not None)
        if ranked:
            write_durably(root / BEST, ranked[0][1].name + "\n")
        kept |= {path for _, path in ranked[: spec.keep_best]}
    for path in published:
        if path not in kept:
            remove_checkpoint(path)
    for path in root.iterdir():
        if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path)


def held_out_loss(checkpoint: Path) -> float | None:
    """The held-out loss measured right before the checkpoint; None if there is none or it cannot be read."""
    try:
        loss = json.loads(regular(checkpoint / TRAINER).read_text())[HELD_OUT_LOSS]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `step` and `files`, name -> bytes and sha256.

    Raises `CheckpointError` if it is missing, damaged, or of another step than the folder's name.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(regular(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, so this checkpoint is incomplete") from None
    except UserError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: is not a manifest") from None
    if not isinstance(manifest, dict) or not {"format", "step", "files"} <= manifest.keys():
        raise CheckpointError(f"{path}: is not a manifest")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: has unknown format {manifest['format']!r}")
    step, files = manifest["step"], manifest["files"]
    if type(step) is not int or step < 0 or not isinstance(files, dict):
        raise CheckpointError(f"{path}: damaged")
    for name, entry in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {name!r} is not a plain file name")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise CheckpointError(f"{path}: damaged, it has no size for {name}")
        if not isinstance(entry.get("sha256"), str):
            raise CheckpointError(f"{path}: damaged, it has no sha256 for {name}")
    if STEP.fullmatch(checkpoint.name) and step != step_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: is the checkpoint of step {step} according to its manifest; rename the folder"
        )
    return manifest


def read_trainer(checkpoint: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The value in `trainer.json`; raises `CheckpointError` if it is not JSON, or of another step than the manifest."""
    path = checkpoint / TRAINER
    try:
        values = json.loads(regular(path).read_bytes())
    except UserError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged, not JSON") from None
    if not isinstance(values, dict) or values.get("step") != manifest["step"]:
        raise CheckpointError(f"{path}: damaged, its step is not the manifest's ({manifest['step']})")
    return values


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compare `files` (name -> bytes, sha256) with what is on disk; raises `CheckpointError` if they differ."""
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes, but {expected['bytes']} were saved")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CheckpointError(f"{path}: damaged, its sha256 differs from the manifest's")


def verify_no_foreign_files(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the folder holds a file that the manifest does not name."""
    for path in sorted(checkpoint.iterdir()):
        if path.name != MANIFEST and path.name not in manifest["files"]:
            raise CheckpointError(f"{path}: is not part of this checkpoint; remove it to continue")
