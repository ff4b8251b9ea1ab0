"""Writes the table of docs/security.md from docs/attack.json, to which `make attack KEEP=1` adds what it found."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

PAGE, RESULTS = (Path(__file__).with_name(name) for name in ("security.md", "attack.json"))
BEGIN, END = "<!-- the table is made by docs/make_security_md.py -->\n", "<!-- end of the table -->\n"
FATES = ("survived", "named", "as written", "vague", "silent", "trace", "hang")


def page() -> str:
    """The page as text, its table made anew."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def table() -> str:
    """Kinds by fates, over all campaigns that are kept."""
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
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(page())
