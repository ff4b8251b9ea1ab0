"""Random legal layouts through `verify`: `python -m mutants.layouts SEED COUNT` prints a line of JSON for each."""

import json
import sys
import time
from typing import Any

from meshwright.spec.run import ResolvedRun
from meshwright.testing.layouts import random_layouts
from mutants.one import answer
from tiny import tiny_run


def legal(options: dict[str, Any]) -> ResolvedRun | None:
    """The tiny run of a drawn layout; None where its batch or pipeline does not come out."""
    try:
        run = tiny_run(**options)
    except ValueError:
        return None
    batch = run.micro_batch * run.accumulation * run.run.layout.data_parallel
    return run if run.micro_batch and batch == run.global_batch else None


if __name__ == "__main__":
    for drawn in random_layouts(seed=int(sys.argv[1]), count=int(sys.argv[2]), build=legal):
        began = time.monotonic()
        found = answer(drawn.run)
        row = {"seed": drawn.seed, "layout": drawn.run.run.layout.strategy, "beside": drawn.beside, **found}
        print(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}), flush=True)
