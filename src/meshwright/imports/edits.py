"""Edits of a text by hand, found by a record of its lines: four hexadecimal digits for each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path

from meshwright.spec.errors import UserError

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
            told = [edit for edit in changed if kind == "replace" or not _is_idle(edit.text)]
            edits += told
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
