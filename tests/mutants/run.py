"""The campaign: `make mutants`, or `python -m mutants.run` from `tests/`.

Every mutant is a fault planted in a module during its import, tried by `verify` in a separate process. Random legal
layouts of the unchanged source must all be equal. Results are saved in docs/mutants.json one by one, so that an
interrupted campaign can continue; docs/make_mutants_md.py makes a page of them. This process imports torch and never
computes (`forked.py`); it imports nothing of this project.
"""

import argparse
import hashlib
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mutants import table_field, table_known, table_steps, table_trainers
from mutants.forked import Child, import_others, plant
from mutants.table import SPLIT, Mutant

ROOT = Path(__file__).resolve().parents[2]
SOURCE, RESULTS = ROOT / "src", ROOT / "docs" / "mutants.json"
MUTANTS = [*SPLIT, *table_steps.MUTANTS, *table_known.MUTANTS, *table_trainers.MUTANTS, *table_field.MUTANTS]
LAYOUTS_AT_ONCE = 10
"""Random layouts tried by one process, one after another."""
KINDS = {"fp64": "mutants", "bf16": "mutants in bf16"}
"""The key of a precision's results."""
PATIENCE = 3600
"""Seconds after which a process counts as dead."""


def key_of(mutant: Mutant) -> str:
    """A key that distinguishes a mutant from others, and from its earlier versions."""
    return hashlib.sha256(repr(mutant[1:5]).encode()).hexdigest()[:12]


def described(mutant: Mutant) -> dict[str, Any]:
    """The fields of a mutant's row that are known before it is tried."""
    return {"fault": mutant.fault, "file": mutant.file, "case": mutant.case, "seen": mutant.seen}


def try_mutant(mutant: Mutant, precision: str) -> dict[str, Any]:
    """One mutant's row. Called in a process that has imported nothing of ours."""
    began = time.monotonic()
    plant(SOURCE / "meshwright" / mutant.file, mutant.old, mutant.new, SOURCE)
    found = answer_case(mutant.case, precision)
    named = found["result"] == "different" and re.fullmatch(mutant.names, found["text"]) is not None
    row = {**described(mutant), **found, "named": named}
    return row | {"seconds": round(time.monotonic() - began, 1)}


def answer_case(case: str, precision: str) -> dict[str, Any]:
    """`verify`'s result for a case."""
    return importlib.import_module("mutants.one").answer_case(case, precision)


def try_layouts(seed: int) -> list[dict[str, Any]]:
    """The rows of random layouts drawn with this seed."""
    return importlib.import_module("mutants.layouts").answer_layouts(seed, LAYOUTS_AT_ONCE)


def work(item: Mutant | int, precision: str) -> Any:
    """A child's work."""
    return try_mutant(item, precision) if isinstance(item, Mutant) else try_layouts(item)


def outcomes(
    items: list[Mutant | int], precision: str, jobs: int, seconds: float
) -> Iterator[tuple[Mutant | int, Any]]:
    """Each item with its row or rows, `jobs` at a time, as they finish; nothing starts after the given seconds."""
    end, waiting, running = time.monotonic() + seconds, list(items), dict[Any, tuple[Mutant | int, Child, float]]()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < end:
            item = waiting.pop(0)
            child = Child(work, item, precision)
            running[child.connection] = item, child, time.monotonic()
        if not running:
            return
        for connection in wait(list(running), timeout=10) or [c for c, (_, _, t) in running.items() if _late(t)]:
            item, child, _ = running.pop(connection)
            try:
                yield item, child.result(1)
            except RuntimeError as error:
                failed = {"result": "fails", "text": str(error)[-1500:]}
                if isinstance(item, Mutant):
                    yield item, {**described(item), "named": False, "seconds": 0.0, **failed}
                else:
                    yield item, [{"seed": item, "layout": "", "beside": "", "seconds": 0.0, **failed}]


def _late(began: float) -> bool:
    return time.monotonic() - began > PATIENCE


def main() -> int:
    """Try mutants without a result, as long as there is time."""
    parser = argparse.ArgumentParser(prog="mutants.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="nothing is begun after so long")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--only", default="", help="mutants whose fault or case has this text, known or not")
    parser.add_argument("--layouts", type=int, default=200, help="random layouts in all")
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    parser.add_argument("--precision", choices=list(KINDS), default="fp64", help="of the mutants' runs")
    parser.add_argument("--again", action="store_true", help="forget what is known of these")
    arguments = parser.parse_args()
    kind = KINDS[arguments.precision]
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known = {one: known.get(one, {}) for one in (*KINDS.values(), "layouts")}
    if arguments.again:
        known[kind] = {}
        known["layouts"] = {} if arguments.layouts else known["layouts"]
    current = {key_of(mutant): mutant for mutant in MUTANTS}
    for one in KINDS.values():
        known[one] = {key: row for key, row in known[one].items() if key in current}
    wanted = [
        mutant
        for key, mutant in current.items()
        if (arguments.only and arguments.only in f"{mutant.fault} {mutant.case}")
        or (not arguments.only and key not in known[kind])
    ]
    seeds = range(arguments.seed, arguments.seed + arguments.layouts, LAYOUTS_AT_ONCE)
    tried = {seed: len(rows) for seed, rows in known["layouts"].items()}
    missing = [seed for seed in seeds if not arguments.only and tried.get(str(seed), 0) < LAYOUTS_AT_ONCE]
    sys.path.insert(0, str(SOURCE))
    import_others(answer_case, "tp", "fp64")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for item, found in outcomes([*wanted, *missing], arguments.precision, arguments.jobs, arguments.seconds):
        at = {"commit": commit.stdout.strip()}
        if isinstance(item, Mutant):
            known[kind][key_of(item)] = found | at
        else:
            known["layouts"][str(item)] = [row | at for row in found]
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        for row in [found] if isinstance(item, Mutant) else found:
            what = row.get("fault", f"{row.get('seed')} {row.get('layout')}")
            print(row["result"], row.get("named", ""), f"{row['seconds']} s", what, row["text"][-300:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
