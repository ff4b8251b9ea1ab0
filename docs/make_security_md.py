"""Writes the tables of docs/security.md from docs/attack.json, to which `make attack ATTACK="--keep docs/attack.json"`
adds what it found."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE, RESULTS = (Path(__file__).with_name(name) for name in ("security.md", "attack.json"))
BEGIN, END = "<!-- the tables are made by docs/make_security_md.py -->\n", "<!-- end of the tables -->\n"
FATES = ("survived", "named", "as written", "vague", "silent", "trace", "hang")


def page() -> str:
    """The page as text, its tables made anew."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


def tables() -> str:
    """Kinds by fates, and every kind cell by cell, over all campaigns that are kept."""
    campaigns: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    if not campaigns:
        return "\nNo campaign has been kept yet.\n\n"
    found: dict[str, Counter[str]] = {}
    for campaign in campaigns:
        for kind, counts in campaign["found"].items():
            found.setdefault(kind, Counter()).update(counts)
    lines = ["", f"| attack | tried | {' | '.join(FATES)} |", "|---|" + "---:|" * (1 + len(FATES))]
    for kind, counts in [*found.items(), ("**all**", sum(found.values(), Counter()))]:
        lines.append(f"| {kind} | {counts.total()} | {' | '.join(str(counts[fate]) for fate in FATES)} |")
    lines += ["", "Found by `python -P -m attack` with:", ""]
    for campaign in campaigns:
        tried = sum(sum(counts.values()) for counts in campaign["found"].values())
        lines.append(
            f"- `{campaign['command']}`: {tried} trials in {campaign['seconds'] / 60:.0f} minutes, {campaign['date']}, "
            f"commit {campaign['commit']}"
        )
    lines += ["", "Cell by cell (of several trials of a cell, every outcome):", ""]
    cells = {kind: rows for campaign in campaigns for kind, rows in campaign.get("cells", {}).items()}
    for kind, rows in cells.items():
        lines += _table(kind, rows)
    return "\n".join(lines) + "\n"


def _table(kind: str, rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What was attacked by how, the longer side downwards."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table: list[Sequence[str]] = [(kind, *columns)]
    table += [(name, *(row.get(column, "") for column in columns)) for name, row in rows.items()]
    if len(columns) >= len(table):
        table = list(zip(*table, strict=True))
    head, *body = table
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|" * (len(head) - 1)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in body), ""]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
