"""The split and the cuts of a model that transformers computes: derived once, in a process of its own, then read from
the cache."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignCuts, ForeignModel, ForeignSplit
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Run
from meshwright.storage.durable import write_durably

FOLDER = "splits"
"""Folder in `data.cache_dir`."""

Derived = TypeVar("Derived", ForeignSplit, ForeignCuts)

FORMAT = 2
"""Incremented when a change of `derive/` makes the same model give another split."""

PATIENCE = 900.0
"""Seconds that a derivation may take."""


def with_derived(model: ModelSpec, run: Run, parts: int | None = None, *, cut: bool | None = None) -> ModelSpec:
    """The model with the split over the layout's tensor-parallel ranks, or over `parts`, and with the cuts if the
    layout has stages, or if `cut`; only if transformers computes it.

    Raises `UserError` if they cannot be derived.
    """
    if model.foreign is None:
        return model
    parts = run.layout.tp if parts is None else parts
    changes, cache = {}, Path(run.data.cache_dir) / FOLDER
    if parts > 1:
        changes["split"] = derived_split(model.foreign, parts, cache, where=f"layout.tp={parts}")
    if run.layout.pp > 1 if cut is None else cut:
        changes["cuts"] = derived_cuts(model.foreign, cache, where=f"layout.pp={run.layout.pp}")
    return model.model_copy(update={"foreign": model.foreign.model_copy(update=changes)})


def derived_split(foreign: ForeignModel, parts: int, cache: Path, *, where: str) -> ForeignSplit:
    """The split of a model over this many ranks, from the cache if it holds it."""
    return _derived(ForeignSplit, {"parts": parts}, foreign, cache, f"{where}: the split of the model")


def derived_cuts(foreign: ForeignModel, cache: Path, *, where: str) -> ForeignCuts:
    """The cuts of a model into pipeline stages, from the cache if it holds them."""
    return _derived(ForeignCuts, {}, foreign, cache, f"{where}: where the model can be cut")


def _derived(kind: type[Derived], about: dict[str, int], foreign: ForeignModel, cache: Path, what: str) -> Derived:
    bare = foreign.model_copy(update={"split": None, "cuts": None})
    question = {"kind": kind.__name__, "foreign": bare.model_dump(mode="json"), **about}
    versions = {name: version(name) for name in ("transformers", "torch")}
    key = json.dumps([FORMAT, versions, question], sort_keys=True)
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if (known := _read(kind, file)) is not None:
        return known
    command = [sys.executable, "-P", "-m", "meshwright.derive"]
    try:
        ended = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{what} was not derived in {PATIENCE:.0f} seconds") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{what} cannot be derived: {last}") from error
    answer = json.loads(ended.stdout)
    if "problem" in answer:
        raise UserError(f"{what} cannot be derived: {answer['problem']}")
    derived = kind.model_validate(answer["derived"])
    cache.mkdir(parents=True, exist_ok=True)
    text = derived.model_dump_json(indent=1)
    write_durably(file, f"{_digest(text)}\n{text}")
    return derived


def _read(kind: type[Derived], file: Path) -> Derived | None:
    """What a file holds; None if there is none, or if it is damaged: it is then derived again."""
    if not file.is_file():
        return None
    digest, _, text = file.read_bytes().decode(errors="replace").partition("\n")
    return kind.model_validate_json(text) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
