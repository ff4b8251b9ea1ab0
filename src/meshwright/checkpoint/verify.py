"""Verification: whether a checkpoint is good, and which other one to use."""

from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import (
    TRAINER,
    CheckpointError,
    list_checkpoints,
    read_manifest,
    read_trainer,
    verify_files,
    verify_no_foreign_files,
)
from meshwright.checkpoint.metadata import METADATA
from meshwright.comm.objects import from_first, gather_everywhere, rank, world_size

START_ANEW = "move the damaged checkpoints away and start without --resume, or use another run_dir"


def verify_checkpoint(checkpoint: Path, *, to_resume: bool = False) -> dict[str, Any]:
    """Check every file against the manifest, divided over ranks; returns the value in `trainer.json`.

    Raises the same `CheckpointError` on every rank. It names the file and the newest good checkpoint to use instead, or
    to resume from if `to_resume`. Collective.
    """
    problems = [text for text in gather_everywhere(_problem(checkpoint, rank(), world_size())) if text]
    if problems:
        raise CheckpointError(f"{problems[0]}; {from_first(_offer(checkpoint, to_resume) if rank() == 0 else None)}")
    return read_trainer(checkpoint, read_manifest(checkpoint))


def read_values(checkpoint: Path) -> dict[str, Any]:
    """The value in `trainer.json`, after checking it and the index; no tensor is read.

    Raises `CheckpointError` like `verify_checkpoint` with `to_resume`. Not collective.
    """
    if problem := _problem(checkpoint, 0, 1, only=(METADATA, TRAINER)):
        raise CheckpointError(f"{problem}; {_offer(checkpoint, to_resume=True)}")
    return read_trainer(checkpoint, read_manifest(checkpoint))


def newest_good_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, if there is one, and the faults of later ones. Collective."""
    faults: list[str] = []
    for name in reversed(from_first([path.name for path in list_checkpoints(root)])):
        problems = [text for text in gather_everywhere(_problem(root / name, rank(), world_size())) if text]
        if not problems:
            return root / name, faults
        faults.append(problems[0])
    return None, faults


def _problem(checkpoint: Path, part: int, parts: int, *, only: tuple[str, ...] = ()) -> str | None:
    """The fault of the checkpoint, or None. Reads every `parts`-th file starting at `part`, or `only` some."""
    try:
        manifest = read_manifest(checkpoint)
        verify_no_foreign_files(checkpoint, manifest)
        names = [name for name in sorted(manifest["files"])[part::parts] if not only or name in only]
        verify_files(checkpoint, {name: manifest["files"][name] for name in names})
        for needed in (METADATA, TRAINER):
            if needed not in manifest["files"]:
                raise CheckpointError(f"{checkpoint / needed}: is not in the manifest, so this is not a checkpoint")
        if TRAINER in names:
            read_trainer(checkpoint, manifest)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or checkpoint}: cannot be read ({error.strerror})"
    return None


def _offer(checkpoint: Path, to_resume: bool) -> str:
    others = [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
    for other in reversed(others):
        if _problem(other, 0, 1) is None:
            name = other.name
            return (
                f"{name} is intact: continue from it with --resume {name}"
                if to_resume
                else f"{other} is intact: use that instead"
            )
    alone = "all other checkpoints are damaged too" if others else "there is no other checkpoint beside it"
    return f"{alone}; {START_ANEW}" if to_resume else alone
