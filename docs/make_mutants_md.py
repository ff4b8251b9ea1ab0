"""Writes docs/mutants.md from docs/mutants.json, which `make mutants` fills."""

import argparse
import json
from pathlib import Path
from typing import Any

PAGE, RESULTS = (Path(__file__).with_name(name) for name in ("mutants.md", "mutants.json"))

INTRODUCTION = """\
# Mutants: what verify catches

`make mutants` measures [verify](verify.md) in two ways:

- It plants {count} realistic faults of distributed training, one at a time, and runs `verify` on a tiny model under a
  layout that the fault affects. Each fault is a patch of this project's source, applied on import (`tests/mutants/`): a
  gradient that is not summed, keys from the wrong rank, a stage that starts a layer early. As with a real fault, the
  reference process runs the patched source too.
- It runs random legal layouts of the unchanged source, which must all be equal to one process. A seed determines
  families, degrees, ZeRO stages, schedules, adapters, optimizers and objectives (`testing/layouts.py`).

`make mutants MUTANTS=--again` starts over; `--precision bf16` plants the faults in bf16.

**Caught**: `verify` reports a difference. **Named**: it reports the first tensor that the fault affects in order of
computation, as predicted in the table of mutants. Seconds are wall time of one process with its ranks on a busy machine
with two cores. Every row was measured at the commit that it names: a fault is tried again when its patch or the proof
that sees it has changed.

| | tried | |
|---|---:|---|
| faults caught | {count} | {caught} ({caught_share:.0%}) |
| faults named | {count} | {named} ({named_share:.0%}) |
{bf16}| random layouts found equal | {layouts} | {equal} |

A fault that also affects one process, such as wrong rope, is not a difference between layouts. The comparison with
transformers finds it ([models](models.md)).
"""


def page() -> str:
    """The page as text."""
    known: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    mutants = sorted(known["mutants"].values(), key=lambda row: (row["file"], row["fault"]))
    layouts = [row for rows in known["layouts"].values() for row in rows]
    layouts = sorted((row for row in layouts if row["result"] != "refused"), key=lambda row: row["seed"])
    caught = sum(row["result"] == "different" for row in mutants)
    named = sum(row["named"] for row in mutants)
    bf16 = list(known.get("mutants in bf16", {}).values())
    lines = [
        INTRODUCTION.format(
            count=len(mutants),
            bf16="".join(
                f"| the same in bf16, {what} | {len(bf16)} | {number} ({number / len(bf16):.0%}) |\n"
                for what, number in (
                    ("caught", sum(row["result"] == "different" for row in bf16)),
                    ("named", sum(row["named"] for row in bf16)),
                )
                if bf16
            ),
            caught=caught,
            named=named,
            caught_share=caught / len(mutants),
            named_share=named / len(mutants),
            layouts=len(layouts),
            equal=sum(row["result"] == "equal" for row in layouts),
        ),
        "## Faults\n",
        "| fault | in | case | reported | named | s | at |",
        "|---|---|---|---|---|---:|---|",
    ]
    for row in mutants:
        reported = row["text"] if row["result"] == "different" else f"**{row['result']}**"
        named_ = "yes" if row["named"] else "**no**"
        lines.append(
            f"| {row['fault']} | `{row['file']}` | {row['case']} | {reported} | {named_} | {row['seconds']:.0f} "
            f"| {row['commit']} |"
        )
    lines += ["", "## Random layouts\n", "| seed | layout | beside | found | s | at |", "|---:|---|---|---|---:|---|"]
    for row in layouts:
        found = row["result"] if row["result"] == "equal" else f"**{row['result']}**: {row['text'].splitlines()[-1]}"
        measured = f"{row['seconds']:.0f} | {row['commit']}"
        lines.append(f"| {row['seed']} | {row['layout']} | `{row['beside']}` | {found} | {measured} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
