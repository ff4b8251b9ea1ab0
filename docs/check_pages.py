"""Compares every page that a script writes with what the script writes now: `make check` runs it."""

import argparse
import os
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent


def is_current(script: Path) -> bool:
    """Whether the page of a script is what the script writes."""
    made = runpy.run_path(str(script))
    return made["PAGE"].read_text(encoding="utf-8") == made["page"]()


def main() -> int:
    """Name the pages that are out of date; returns the exit status."""
    scripts = sorted([*HERE.glob("make_*_md.py"), *HERE.glob("make_*_csv.py")])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        stale = [script for script, current in zip(scripts, pool.map(is_current, scripts), strict=True) if not current]
    for script in stale:
        print(f"out of date: run python docs/{script.name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
