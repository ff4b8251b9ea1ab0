"""Random legal layouts through `verify`, each in a process forked from one that has imported everything."""

import time
from typing import Any

from meshwright.predict.engine import layout_check
from meshwright.spec.run import ResolvedRun
from meshwright.testing.layouts import random_layouts
from mutants.forked import SECONDS, Child
from mutants.one import answer
from tiny import tiny_run


def legal(options: dict[str, Any]) -> ResolvedRun | None:
    """The tiny run of a drawn layout; None if batch or pipeline do not fit it, or training refuses it."""
    try:
        run = tiny_run(**options)
    except ValueError:
        return None
    batch = run.micro_batch * run.accumulation * run.run.layout.data_parallel
    if not run.micro_batch or batch != run.global_batch:
        return None
    return None if layout_check(run.run, run.model, "cpu")(run.run.layout) else run


def in_own_precision(run: ResolvedRun, seed: int) -> ResolvedRun:
    """The same run in the precision of a recipe: every fourth in fp16, the others in bf16."""
    training = run.run.training.model_copy(update={"precision": "fp16" if seed % 4 == 3 else "bf16"})
    return run.model_copy(update={"run": run.run.model_copy(update={"training": training})})


def answer_layouts(seed: int, count: int) -> list[dict[str, Any]]:
    """One row for each layout drawn with this seed."""
    rows = []
    for drawn in random_layouts(seed=seed, count=count, build=legal):
        began = time.monotonic()
        try:
            found = Child(answer, drawn.run, in_own_precision(drawn.run, drawn.seed)).result(4 * SECONDS)
        except RuntimeError as error:
            found = {"result": "fails", "text": str(error)[-1500:]}
        row = {"seed": drawn.seed, "layout": drawn.run.run.layout.strategy, "beside": drawn.beside, **found}
        rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
    return rows
