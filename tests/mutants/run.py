"""The campaign: `make mutants`, or `python -m mutants.run` from `tests/`.

Every mutant is a patch of a copy of the source, tried by `verify` in a process of its own; random legal layouts of the
source as it is must all be found equal. Results are kept in docs/mutants.json as they come, so that a campaign can be
interrupted and goes on; docs/make_mutants_md.py makes a page of them.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from mutants import table_steps
from mutants.table import SPLIT, Mutant

ROOT = Path(__file__).resolve().parents[2]
SOURCE, RESULTS = ROOT / "src", ROOT / "docs" / "mutants.json"
MUTANTS = [*SPLIT, *table_steps.MUTANTS]
LAYOUTS_AT_ONCE = 10
"""Random layouts tried by one process."""


def key_of(mutant: Mutant) -> str:
    """What tells a mutant from others, and from what it was before it was changed."""
    return hashlib.sha256(repr(mutant[1:5]).encode()).hexdigest()[:12]


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the source in `folder` with the mutant's fault; `ValueError` where its text is not there once."""
    shutil.copytree(SOURCE / "meshwright", folder / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "meshwright" / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.fault}: {mutant.file} has the text {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))


def ask(words: list[str], source: Path) -> Iterator[Any]:
    """What a process on `source` prints, a JSON value a line; raises `RuntimeError` where it fails."""
    environment = os.environ | {"PYTHONPATH": f"{source}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment, cwd=ROOT / "tests", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    yield from map(json.loads, done.stdout.splitlines())


def try_mutant(mutant: Mutant) -> dict[str, Any]:
    """One mutant's row."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-mutant-") as name:
        plant(mutant, Path(name))
        try:
            (found,) = ask(["mutants.one", mutant.case], Path(name))
        except RuntimeError as error:
            found = {"result": "fails", "text": str(error)}
    named = found["result"] == "different" and re.fullmatch(mutant.names, found["text"]) is not None
    seconds = round(time.monotonic() - began, 1)
    return {
        "fault": mutant.fault,
        "file": mutant.file,
        "case": mutant.case,
        **found,
        "named": named,
        "seconds": seconds,
    }


def try_layouts(seed: int) -> list[dict[str, Any]]:
    """The rows of some random layouts, drawn by this seed."""
    try:
        return list(ask(["mutants.layouts", str(seed), str(LAYOUTS_AT_ONCE)], SOURCE))
    except RuntimeError as error:
        return [{"seed": seed, "result": "fails", "text": str(error)}]


def main() -> int:
    """Try what is not known yet, for as long as there is time."""
    parser = argparse.ArgumentParser(prog="mutants.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="nothing is begun after so long")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--only", default="", help="mutants whose fault or case has this text, known or not")
    parser.add_argument("--layouts", type=int, default=200, help="random layouts in all")
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    arguments = parser.parse_args()
    known = {"mutants": {}, "layouts": {}}
    if RESULTS.is_file() and not arguments.again:
        known = json.loads(RESULTS.read_text())
    current = {key_of(mutant): mutant for mutant in MUTANTS}
    known["mutants"] = {key: row for key, row in known["mutants"].items() if key in current}
    end = time.monotonic() + arguments.seconds
    wanted = [
        mutant
        for key, mutant in current.items()
        if (arguments.only and arguments.only in f"{mutant.fault} {mutant.case}")
        or (not arguments.only and key not in known["mutants"])
    ]
    seeds = range(arguments.seed, arguments.seed + arguments.layouts, LAYOUTS_AT_ONCE)
    tried = {seed: len(rows) for seed, rows in known["layouts"].items()}
    missing = [seed for seed in seeds if not arguments.only and tried.get(str(seed), 0) < LAYOUTS_AT_ONCE]

    def work(item: Mutant | int) -> tuple[str, str, Any] | None:
        if time.monotonic() > end:
            return None
        if isinstance(item, Mutant):
            return "mutants", key_of(item), try_mutant(item)
        return "layouts", str(item), try_layouts(item)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in as_completed([pool.submit(work, item) for item in [*wanted, *missing]]):
            found = future.result()
            if found is None:
                continue
            kind, key, value = found
            known[kind][key] = value
            RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            for row in [value] if kind == "mutants" else value:
                print(
                    row["result"],
                    row.get("named", ""),
                    row.get("fault", row.get("layout")),
                    row["text"][-300:],
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
