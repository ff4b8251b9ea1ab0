"""Entry point of one step: `python -m meshwright.accept.step NAME --device cuda --work DIR --results FILE`."""

import argparse
import importlib
import traceback
from pathlib import Path

from meshwright.accept.check import Check, Place, write_check


def main() -> None:
    """Write the step's checks as it makes them; an exception is the last one."""
    parser = argparse.ArgumentParser(prog="meshwright.accept.step", description=__doc__)
    parser.add_argument("name", help="the step")
    parser.add_argument("--device", required=True, help="cuda or cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder of recipes and runs")
    parser.add_argument("--results", type=Path, required=True, help="file for the checks")
    parser.add_argument("--references", type=Path, help="figures of a CPU")
    parser.add_argument("--nanogpt", type=Path, help="folder of nanoGPT's code")
    options = parser.parse_args()
    place = Place(options.device, options.work, options.references, options.nanogpt)
    step = importlib.import_module(f"meshwright.accept.{options.name}")
    try:
        for check in step.checks(place):
            write_check(check, options.results)
    except Exception:
        # Whatever fails on an unknown machine belongs into its report.
        write_check(Check("no exception", passed=False, detail=traceback.format_exc()[-3000:]), options.results)


if __name__ == "__main__":
    main()
