"""Verification: whether a checkpoint may be used, and which other one could be."""

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

START_ANEW = "move what is damaged away and start without --resume, or start in another run_dir"


def verify_checkpoint(checkpoint: Path, *, to_resume: bool = False) -> dict[str, Any]:
    """Check every file against the manifest, the work divided over ranks; returns the value in `trainer.json`.

    Raises the same `CheckpointError` on every rank, naming the file and the newest checkpoint that is good: what to
    give instead, or to continue from where that is what the checkpoint is for (`to_resume`). Collective.
    """
    problems = [text for text in gather_everywhere(_problem(checkpoint, rank(), world_size())) if text]
    if problems:
        raise CheckpointError(f"{problems[0]}; {from_first(_offer(checkpoint, to_resume) if rank() == 0 else None)}")
    return read_trainer(checkpoint, read_manifest(checkpoint))


def read_values(checkpoint: Path) -> dict[str, Any]:
    """The value in `trainer.json`, once that and the index are as they were saved; no tensor is read.

    Raises `CheckpointError` as `verify_checkpoint`, for continuing. Each rank by itself.
    """
    if problem := _problem(checkpoint, 0, 1, only=(METADATA, TRAINER)):
        raise CheckpointError(f"{problem}; {_offer(checkpoint, to_resume=True)}")
    return read_trainer(checkpoint, read_manifest(checkpoint))


def newest_good_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint without a fault, if there is one, and what is wrong with those after it. Collective."""
    faults: list[str] = []
    for name in reversed(from_first([path.name for path in list_checkpoints(root)])):
        problems = [text for text in gather_everywhere(_problem(root / name, rank(), world_size())) if text]
        if not problems:
            return root / name, faults
        faults.append(problems[0])
    return None, faults


def _problem(checkpoint: Path, part: int, parts: int, *, only: tuple[str, ...] = ()) -> str | None:
    """What is wrong with the checkpoint, every `parts`-th file from `part` on being read, or `only` those; None if
    nothing is."""
    try:
        manifest = read_manifest(checkpoint)
        verify_no_foreign_files(checkpoint, manifest)
        names = [name for name in sorted(manifest["files"])[part::parts] if not only or name in only]
        verify_files(checkpoint, {name: manifest["files"][name] for name in names})
        for needed in (METADATA, TRAINER):
            if needed not in manifest["files"]:
                raise CheckpointError(f"{checkpoint / needed}: not named by the manifest, so this is not a checkpoint")
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
                f"{name} is good, continue from it with --resume {name}"
                if to_resume
                else f"{other} is good, give that instead"
            )
    alone = "the others are damaged too" if others else "there is no other checkpoint beside it"
    return f"{alone}; {START_ANEW}" if to_resume else alone
