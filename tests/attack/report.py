"""What an attack found, as tables: every kind of file with every kind of damage, and all kinds by outcome."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attack.trial import FAILURES, Cell, Fate, Trial

ROOT = Path(__file__).parents[2]
GOOD_FATES: tuple[Fate, ...] = ("survived", "named", "as written")
FATES: tuple[Fate, ...] = (*GOOD_FATES, *FAILURES)
NOT_TRIED = "-"


def show(trial: Trial) -> None:
    """One trial, with the end of its output."""
    said = "".join(f"\n    {line}" for line in trial.said.splitlines()[-20:])
    print(f"{trial.fate}: {trial.done}  (--again '{trial.seed}'){said}", flush=True)


def kinds_of(trials: Sequence[Trial]) -> list[str]:
    """The kinds, in order."""
    return list(dict.fromkeys(trial.attack for trial in trials))


def summary(trials: Sequence[Trial]) -> str:
    """Kinds by fates, as Markdown."""
    rows = [
        *((kind, Counter(trial.fate for trial in trials if trial.attack == kind)) for kind in kinds_of(trials)),
        ("all", Counter(trial.fate for trial in trials)),
    ]
    return markdown(
        ("attack", "tried", *FATES),
        [(kind, str(count.total()), *(str(count[fate]) for fate in FATES)) for kind, count in rows],
    )


def cells_of(trials: Sequence[Trial]) -> dict[str, dict[str, dict[str, str]]]:
    """Kind -> what was attacked -> how -> what happened; of several outcomes of a cell, all, the worst first."""
    found: dict[str, dict[Cell, set[Fate]]] = {}
    for trial in trials:
        if any(trial.cell):
            found.setdefault(trial.attack, {}).setdefault(trial.cell, set()).add(trial.fate)
    table: dict[str, dict[str, dict[str, str]]] = {}
    for kind, fates in found.items():
        for (row, column), some in fates.items():
            worst = sorted(some, key=FATES.index, reverse=True)
            table.setdefault(kind, {}).setdefault(row, {})[column] = ", ".join(worst)
    return table


def tables(cells: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The cells as Markdown, a table for each kind."""
    texts = []
    for kind, rows in cells.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        head = (kind, *columns)
        body = [(name, *(row.get(column, NOT_TRIED) for column in columns)) for name, row in rows.items()]
        if len(columns) > len(body):  # the longer side downwards
            head, *body = zip(*[head, *body], strict=True)
        texts.append(markdown(head, body))
    return "\n\n".join(texts)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose failures are bold."""
    lines = [head, ("---",) * len(head), *(tuple(map(_marked, row)) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _marked(text: str) -> str:
    return f"**{text}**" if any(fate in text.split(", ") for fate in FAILURES) else text


def keep(file: Path, trials: Sequence[Trial], command: str, seconds: float) -> None:
    """Add one campaign for `docs/make_security_md.py`; one of all kinds replaces those of other commits."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    known: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    if "--only" not in command:
        known = [campaign for campaign in known if campaign["commit"] == commit]
    found = {kind: Counter(trial.fate for trial in trials if trial.attack == kind) for kind in kinds_of(trials)}
    about = {"date": time.strftime("%F"), "commit": commit, "command": command, "seconds": round(seconds)}
    file.write_text(json.dumps([*known, {**about, "found": found, "cells": cells_of(trials)}], indent=1) + "\n")
