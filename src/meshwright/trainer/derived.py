"""The split of a model that transformers computes: derived once, in a process of its own, then read from the cache."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel, ForeignSplit
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Run
from meshwright.storage.durable import write_durably

FOLDER = "splits"
"""Folder in `data.cache_dir`."""

FORMAT = 1
"""Incremented when a change of `derive/` makes the same model give another split."""

PATIENCE = 900.0
"""Seconds that a derivation may take."""


def with_split(model: ModelSpec, run: Run, parts: int | None = None) -> ModelSpec:
    """The model with the split over the layout's tensor-parallel ranks, or over `parts`, if transformers computes it.

    Raises `UserError` if no split can be derived.
    """
    parts = run.layout.tp if parts is None else parts
    if model.foreign is None or parts == 1:
        return model
    split = derived_split(model.foreign, parts, Path(run.data.cache_dir) / FOLDER, where=f"layout.tp={parts}")
    return model.model_copy(update={"foreign": model.foreign.model_copy(update={"split": split})})


def derived_split(foreign: ForeignModel, parts: int, cache: Path, *, where: str) -> ForeignSplit:
    """The split of a model over this many ranks, from the cache if it holds it."""
    question = {"foreign": foreign.model_dump(mode="json"), "parts": parts}
    versions = {name: version(name) for name in ("transformers", "torch")}
    about = json.dumps([FORMAT, versions, question], sort_keys=True)
    file = cache / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
    if (known := _read(file)) is not None:
        return known
    command = [sys.executable, "-P", "-m", "meshwright.derive"]
    try:
        ended = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{where}: the split of the model was not derived in {PATIENCE:.0f} seconds") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{where}: the split of the model cannot be derived: {last}") from error
    answer = json.loads(ended.stdout)
    if "problem" in answer:
        raise UserError(f"{where}: the split of the model cannot be derived: {answer['problem']}")
    split = ForeignSplit.model_validate(answer["split"])
    cache.mkdir(parents=True, exist_ok=True)
    text = split.model_dump_json(indent=1)
    write_durably(file, f"{_digest(text)}\n{text}")
    return split


def _read(file: Path) -> ForeignSplit | None:
    """The split in a file; None if there is none, or if it is damaged: it is then derived again."""
    if not file.is_file():
        return None
    digest, _, text = file.read_bytes().decode(errors="replace").partition("\n")
    return ForeignSplit.model_validate_json(text) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
