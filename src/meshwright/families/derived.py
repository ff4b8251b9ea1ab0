"""What is derived about a model that transformers computes: its splits over tensor-parallel ranks, its cuts into
pipeline stages, whether context-parallel ranks can share its rows, and how expert-parallel ranks share its experts.
Derived once, in a process of its own, then read from the cache."""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignContext, ForeignCuts, ForeignExperts, ForeignModel, ForeignSplit
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Run
from meshwright.storage.durable import write_durably

FOLDER = "splits"
"""Folder in `data.cache_dir`."""

FORMAT = 3
"""Incremented when a change of `derive/` makes the same model give another split."""

PATIENCE = 900.0
"""Seconds that a derivation may take."""

EXPERTS, CUTS, CONTEXT = -1, 0, 1
"""Ask for the experts, the cuts and the context; a larger number asks for the split over this many ranks."""

Derived = ForeignSplit | ForeignCuts | ForeignContext | ForeignExperts


def with_derived(model: ModelSpec, run: Run, parts: int | None = None, *, everything: bool = False) -> ModelSpec:
    """The model with the split over the layout's tensor-parallel ranks, or over `parts`, and with the cuts, the context
    and the experts if the layout has stages, context-parallel and expert-parallel ranks, or with `everything`; only if
    transformers computes it.

    Raises `UserError` if they cannot be derived.
    """
    foreign, parts = model.foreign, run.layout.tp if parts is None else parts
    wanted = [CUTS] if everything or run.layout.pp > 1 else []
    wanted += [CONTEXT] if everything or run.layout.cp > 1 else []
    wanted += [EXPERTS] if everything or run.layout.ep > 1 else []
    wanted += [parts] if parts > 1 else []
    if foreign is None or not wanted:
        return model
    derived = derive(foreign, wanted, Path(run.data.cache_dir) / FOLDER)
    for number, one in derived.items():
        if isinstance(one, ForeignSplit) and one.problem:
            raise UserError(f"layout.tp={number}: the split of the model cannot be derived: {one.problem}")
    return _with(model, foreign, derived)


def with_options(model: ModelSpec, run: Run, degrees: Iterable[int]) -> ModelSpec:
    """The model with everything that layouts of these tensor-parallel degrees, with and without stages and
    context-parallel ranks, need for a plan. What cannot be derived has a `problem`."""
    if model.foreign is None:
        return model
    return _with(
        model, model.foreign, derive(model.foreign, [CUTS, CONTEXT, *degrees], Path(run.data.cache_dir) / FOLDER)
    )


def _with(model: ModelSpec, foreign: ForeignModel, derived: dict[int, Derived]) -> ModelSpec:
    splits = tuple(one for one in derived.values() if isinstance(one, ForeignSplit))
    cuts = next((one for one in derived.values() if isinstance(one, ForeignCuts)), None)
    context = next((one for one in derived.values() if isinstance(one, ForeignContext)), None)
    experts = next((one for one in derived.values() if isinstance(one, ForeignExperts)), None)
    shown = next((split for split in splits if split.modules), splits[0] if splits else None)
    others = tuple(split for split in splits if split is not shown)
    changes = {"split": shown, "cuts": cuts, "context": context, "experts": experts, "others": others}
    return model.model_copy(update={"foreign": foreign.model_copy(update=changes)})


def derive(foreign: ForeignModel, wanted: Sequence[int], cache: Path) -> dict[int, Derived]:
    """The answers by their numbers, from the cache if it holds them. Problems of transformers' own code are in the
    answers, and are not cached."""
    bare = foreign.model_copy(
        update={"split": None, "cuts": None, "context": None, "experts": None, "others": ()}
    ).model_dump(mode="json")
    files = {number: cache / f"{_key(bare, number)}.json" for number in wanted}
    known = {number: _read(number, file) for number, file in files.items()}
    missing = [number for number, one in known.items() if one is None]
    answers = _ask(bare, missing) if missing else {}
    for number, answer in answers.items():
        if "problem" not in answer:
            cache.mkdir(parents=True, exist_ok=True)
            text = json.dumps(answer["derived"], indent=1)
            write_durably(files[number], f"{_digest(text)}\n{text}")
    derived = {number: one for number, one in known.items() if one is not None}
    derived |= {number: _of(number, answer) for number, answer in answers.items()}
    return {number: derived[number] for number in wanted}


def _ask(bare: dict[str, object], numbers: Sequence[int]) -> dict[int, dict[str, object]]:
    """Each number's {"derived": ...} or {"problem": reason}, from a process of its own."""
    import subprocess  # not in a browser tab

    question = json.dumps({"foreign": bare, "wanted": numbers})
    command = [sys.executable, "-P", "-m", "meshwright.derive"]
    try:
        ended = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except subprocess.TimeoutExpired:
        problem = f"not derived in {PATIENCE:.0f} seconds"
    except subprocess.CalledProcessError as error:
        problem = (error.stderr.strip().splitlines() or ["no message"])[-1]
    else:
        return dict(zip(numbers, json.loads(ended.stdout), strict=True))
    return {number: {"problem": problem} for number in numbers}


_KINDS: dict[int, type[ForeignCuts | ForeignContext | ForeignExperts]] = {
    EXPERTS: ForeignExperts,
    CUTS: ForeignCuts,
    CONTEXT: ForeignContext,
}


def _of(number: int, answer: dict[str, object]) -> Derived:
    if number in _KINDS:
        return _KINDS[number].model_validate(answer.get("derived") or answer)
    return ForeignSplit.model_validate(answer.get("derived") or {"tp": number, **answer})


def _key(bare: dict[str, object], number: int) -> str:
    text = json.dumps([FORMAT, _version("transformers"), _version("torch"), bare, number], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _read(number: int, file: Path) -> Derived | None:
    """What a file holds; None if there is none, or if it is damaged: it is then derived again."""
    if not file.is_file():
        return None
    digest, _, text = file.read_bytes().decode(errors="replace").partition("\n")
    return _of(number, {"derived": json.loads(text)}) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
