"""A run's directory: the names in it, its lock, and the records that make a checkpoint complete."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint.manifest import MANIFEST, CheckpointError, list_checkpoints
from meshwright.launch.status import LOCK_LOST
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe, load_spec
from meshwright.spec.run import ResolvedRun
from meshwright.storage.durable import write_durably, write_json
from meshwright.storage.lock import Lock

SETTING = "checkpoint.start_from"

RECIPE, RESOLVED, PLAN = "recipe.yaml", "resolved.yaml", "plan.json"
TOKENIZER, LOCK = "tokenizer", ".lock"
"""Names in a run directory: the recipe as given, the fully resolved run, the planner's result, the tokenizer's folder,
the lock."""


def run_files(run_dir: Path) -> dict[str, bytes]:
    """The recipe, the resolved run and the tokenizer, by plain names: with them a checkpoint needs no run directory."""
    paths = [run_dir / RECIPE, run_dir / RESOLVED, *sorted((run_dir / TOKENIZER).glob("*"))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


class Records(NamedTuple):
    """A run's records besides its tensors."""

    resolved: Path
    """A `resolved.yaml`."""
    tokenizer: Path
    """The tokenizer's folder."""


def records_in(run_dir: Path) -> Records | None:
    """The records in a run directory; None if it has none."""
    records = Records(run_dir / RESOLVED, run_dir / TOKENIZER)
    return records if records.resolved.is_file() else None


def records_of(checkpoint: Path) -> Records | None:
    """The records in a checkpoint; for one from an earlier version, those in its run directory; None if there are
    none."""
    if (checkpoint / RESOLVED).is_file():
        return Records(checkpoint / RESOLVED, checkpoint)
    return records_in(checkpoint.resolve().parent.parent)


def checkpoint_at(path: Path, setting: str) -> Path:
    """The checkpoint at `path`, or the newest one of the run at `path`; raises `CheckpointError`."""
    if (path / MANIFEST).is_file():
        return path
    saved = list_checkpoints(path / "checkpoints")
    if not saved:
        raise CheckpointError(f"{setting}: {path} is neither a checkpoint nor a run with one")
    return saved[-1]


def check_writable(run_dir: Path) -> None:
    """Raise `UserError` if `run_dir` cannot be made or written. Leaves no files.

    Permissions are not enough (root has all of them, even on a read-only disk), so a folder is made and removed again.
    """
    place = run_dir
    try:
        place = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=place):
            pass
    except OSError as error:
        reason = (error.strerror or "it cannot be used").lower()
        raise UserError(f"run_dir={run_dir}: {place} is not writable ({reason}); choose another") from error


def run_lock(run_dir: Path, wait: float) -> Lock:
    """The lock of `run_dir` against other runs; waits up to `wait` seconds for its current owner.

    Raises `UserError` if nothing can be written there.
    """

    def lost(text: str) -> None:
        print(f"error: {text}; this run ends", file=sys.stderr, flush=True)
        os._exit(LOCK_LOST)  # at once: any further write would overwrite the other run's

    check_writable(run_dir)
    hint = "; wait for it with --wait-for-lock, or choose another run_dir"
    return Lock(run_dir / LOCK, wait=wait, hint=hint, say=lambda text: print(text, file=sys.stderr), lost=lost)


def read_resolved(path: Path) -> ResolvedRun:
    """Read a `resolved.yaml`, with the `plan.json` next to it. Raises `UserError` if one is damaged."""
    resolved, plan = load_spec(path, ResolvedRun), path.with_name(PLAN)
    if not plan.is_file():
        return resolved
    try:
        return resolved.model_copy(update={"plan": json.loads(plan.read_bytes())})
    except (ValueError, RecursionError) as error:
        raise UserError(f"{plan} is damaged, not JSON ({error}); delete it to continue without it") from error


def write_run_files(resolved: ResolvedRun, run_dir: Path) -> None:
    """Write `recipe.yaml` as given, `resolved.yaml` with every `auto` resolved, `plan.json` if the planner decided."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(run_dir / RECIPE, dump_recipe(resolved.given or resolved.run))
    write_durably(run_dir / RESOLVED, dump_recipe(resolved.model_copy(update={"plan": None}), expanded=True))
    if resolved.plan is not None:
        write_json(run_dir / PLAN, resolved.plan)


def starting_checkpoint(resolved: ResolvedRun) -> Path:
    """The checkpoint that `checkpoint.start_from` names; raises `CheckpointError` if it does not exist."""
    return checkpoint_at(Path(resolved.base_dir) / (resolved.run.checkpoint.start_from or ""), SETTING)


def starting_records(resolved: ResolvedRun) -> Records | None:
    """The records of the run that `checkpoint.start_from` names, or of a checkpoint outside its run directory; None if
    there are none. Raises like `starting_checkpoint`."""
    if not resolved.run.checkpoint.start_from:
        return None
    checkpoint = starting_checkpoint(resolved)
    return records_in(checkpoint.parent.parent) or records_of(checkpoint)
