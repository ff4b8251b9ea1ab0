"""Another engine's program that Meshwright has written: its constants, and the recipe at its end."""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

from meshwright.imports.reading import Reading, flat
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError
from meshwright.spec.run import DEFAULT_GLOBAL_BATCH
from meshwright.spec.training import TrainingSpec
from meshwright.storage.opening import read_data

DIGITS = re.compile(r"[0-9a-f]{4}")
IN_A_LINE = 22
LARGEST = 2000
"""Lines between the first and the last edit that are compared one by one."""


@dataclass(frozen=True)
class Edit:
    """A line that was changed or added, or the place of lines that were removed."""

    line: int
    """Counted from 1."""
    text: str
    lines: frozenset[int]
    """The changed or added line; none where lines were only removed."""


def record_of(text: str) -> list[str]:
    """The record of a text, in lines of a comment."""
    marks = _marks(text)
    return [" ".join(marks[start : start + IN_A_LINE]) for start in range(0, len(marks), IN_A_LINE)]


def edits_of(text: str, record: Sequence[str], path: Path) -> list[Edit]:
    """The edits since the record was made. Added comments and empty lines, and spaces at the end of a line, are none.

    Raises `UserError` if the record is damaged.
    """
    before, after = " ".join(record).split(), _marks(text)
    if not before or not all(DIGITS.fullmatch(mark) for mark in before):
        raise UserError(f"{path}: the record of the program's lines is damaged; export the program again")
    lines = text.split("\n")
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    end = 0
    while end < min(len(before), len(after)) - same and before[-1 - end] == after[-1 - end]:
        end += 1
    first, second = before[same : len(before) - end], after[same : len(after) - end]
    if second and max(len(first), len(second)) > LARGEST:
        return [_edit(same + number, lines) for number in range(len(second))]
    edits: list[Edit] = []
    for kind, gone, last, start, stop in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "delete" and set(first[gone:last]) != {EMPTY}:
            edits.append(Edit(same + start + 1, "lines before this one were removed", frozenset()))
        elif kind in ("insert", "replace"):
            changed = [_edit(same + number, lines) for number in range(start, stop)]
            kept = [edit for edit in changed if kind == "replace" or not _is_idle(edit.text)]
            edits += kept
    return edits


def _edit(index: int, lines: Sequence[str]) -> Edit:
    return Edit(index + 1, lines[index].strip(), frozenset([index + 1]))


def _is_idle(line: str) -> bool:
    return not line or line.startswith("#")


def _marks(text: str) -> list[str]:
    return [_mark(line) for line in text.rstrip().split("\n")]


def _mark(line: str) -> str:
    return sha256(line.rstrip().encode()).hexdigest()[:4]


EMPTY = _mark("")


RECORD = "# Its lines as they were written, by which `meshwright import` finds edited ones:\n"
MARK = "# The recipe of this program, which `meshwright import` reads:\n"
CONSTANTS = {
    "STEPS": "training.steps",
    "GLOBAL_BATCH": "training.global_batch",
    "MICRO_BATCH": "training.micro_batch",
    "LENGTH": "data.sequence_length",
    "LR": "training.optimizer.lr",
    "BETAS": "training.optimizer.betas",
    "EPS": "training.optimizer.eps",
    "WEIGHT_DECAY": "training.optimizer.weight_decay",
    "CLIP": "training.clip",
}
"""A program's constant -> its setting in a recipe."""
MOST_EDITS = 30
"""Edited places of a program that are named one by one."""
SHOWN = 80
"""Characters of an edited line that the report shows."""


@dataclass(frozen=True)
class _Constant:
    """A constant of a program."""

    value: Any
    line: int
    """Counted from 1."""


def with_recipe(program: str, recipe: str) -> str:
    """A program with a record of its lines and its recipe as its last lines."""
    program = f"{program.rstrip()}\n\n"
    record = "".join(f"#   {line}\n" for line in record_of(program))
    return program + RECORD + record + MARK + "".join(f"#   {line}\n" for line in recipe.splitlines())


def is_program(text: str) -> bool:
    """Whether Meshwright has written this program."""
    return any(mark.strip() in text for mark in (RECORD, MARK))


def read_program(reading: Reading, text: str, path: Path) -> None:
    """Read the recipe in a program, and its constants, which may have been edited since. Name every other edit."""
    text = text.replace("\r\n", "\n")
    program, _, comment = text.partition(MARK)
    recipe = read_data(Path(f"{path}.yaml"), "\n".join(_commented(comment)))
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: contains no recipe after '{MARK.strip()}'")
    settings = flat({"model.name" if key == "model" and isinstance(value, str) else key: value
                     for key, value in recipe.items()})  # fmt: skip
    program, recorded, record = program.partition(RECORD)
    body = _parsed(program, path)
    edits = edits_of(program, _commented(record), path) if recorded else None
    _read_constants(reading, _constants(body, path), settings, edits, path)
    if edits is None:
        reading.notes.append(f"{path.name} has no record of its lines: other edits than of constants are unseen")
    else:
        _name_edits(reading, [edit for edit in edits if not edit.lines & _constant_lines(body)], path)
    for number, line in enumerate(text.split("\n"), 1):
        if number > program.count("\n") and line.strip() and not line.startswith("#"):
            reading.drop(f"{path.name}:{number}: {line.strip()[:SHOWN]}", "edited by hand, not imported")
    reading.is_whole = True
    for setting, value in settings.items():
        if setting not in reading.settings:
            reading.set(setting, value, f"{path.name}: {setting}")


def _commented(text: str) -> list[str]:
    return [line[4:] for line in text.splitlines() if line.startswith("#   ")]


def _name_edits(reading: Reading, edits: list[Edit], path: Path) -> None:
    if len(edits) > MOST_EDITS:
        reading.drop(
            f"{path.name}:{edits[0].line}",
            f"{len(edits)} places from here on were edited by hand, which is not imported",
        )
        return
    for edit in edits:
        reading.drop(f"{path.name}:{edit.line}: {edit.text[:SHOWN]}", "edited by hand, not imported")


def _read_constants(
    reading: Reading,
    constants: Mapping[str, _Constant],
    settings: dict[str, Any],
    edits: list[Edit] | None,
    path: Path,
) -> None:
    """Set the constants that differ from the recipe at the end of the program: the program trains with them."""
    edited = set().union(*(edit.lines for edit in edits or ()))
    for name, constant in constants.items():
        setting = CONSTANTS[name]
        before = _expected(setting, settings)
        if before == constant.value or (before == "auto" and constant.line not in edited):
            continue
        origin = f"{path.name}: {name}={constant.value}"
        changed = "the program" if edits is None or constant.line in edited else "the recipe at its end"
        reading.notes.append(f"{origin}: {changed} was edited; its recipe has {before}")
        reading.set(setting, constant.value, origin)
    _read_batch(reading, constants, settings, path)
    for name in CONSTANTS.keys() - constants.keys() if edits is not None else ():
        reading.drop(f"{path.name}: {name}", "the program no longer sets it to a number; its recipe's value is taken")


def _read_batch(reading: Reading, constants: Mapping[str, _Constant], settings: dict[str, Any], path: Path) -> None:
    """Set the global batch, where the recipe has a default, or tokens of samples that have another length now."""
    known, tokens = "training.global_batch", "training.global_batch_tokens"
    if "GLOBAL_BATCH" not in constants or known in settings:
        return
    origin = f"{path.name}: GLOBAL_BATCH={constants['GLOBAL_BATCH'].value}"
    if tokens not in settings:
        reading.set(known, constants["GLOBAL_BATCH"].value, origin)
    elif reading.settings.keys() & {known, "data.sequence_length"}:
        reading.set(known, constants["GLOBAL_BATCH"].value, f"{origin}, instead of {settings.pop(tokens)} tokens")


def _expected(setting: str, settings: Mapping[str, Any]) -> Any:
    """What a recipe with these settings, and the defaults of all others, makes of a setting."""
    if setting in settings:
        return settings[setting]
    if setting == "data.sequence_length":
        return DataSpec.model_fields["sequence_length"].default
    if setting == "training.global_batch":
        tokens, length = settings.get("training.global_batch_tokens"), _expected("data.sequence_length", settings)
        return tokens // length if isinstance(tokens, int) and isinstance(length, int) else DEFAULT_GLOBAL_BATCH
    default = reduce(getattr, setting.split(".")[1:], TrainingSpec())
    return list(default) if isinstance(default, tuple) else default


def _parsed(program: str, path: Path) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own about a user's file
            return ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: cannot be read as Python: {error}") from error


def _assigned(node: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """What a statement assigns, one by one or several in a line."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return list(zip(target.elts, node.value.elts, strict=False))
    return [(target, node.value)]


def _constants(body: list[ast.stmt], path: Path) -> dict[str, _Constant]:
    """The constants that a program assigns; of two assignments the last counts."""
    return {
        name.id: _Constant(_value(value, name.id, path), node.lineno)
        for node in body
        for name, value in _assigned(node)
        if isinstance(name, ast.Name) and name.id in CONSTANTS
    }


def _constant_lines(body: list[ast.stmt]) -> set[int]:
    """The lines that assign nothing but constants."""
    lines: set[int] = set()
    for node in body:
        pairs = _assigned(node)
        if pairs and all(isinstance(name, ast.Name) and name.id in CONSTANTS for name, _ in pairs):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _value(node: ast.expr, name: str, path: Path) -> Any:
    """A number or a pair of them; `math.inf` means no clipping."""
    if isinstance(node, ast.Attribute) and node.attr == "inf":
        return None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError) as error:
        raise UserError(f"{path}:{node.lineno}: {name} is not a number") from error
    return list(value) if isinstance(value, tuple) else value
