"""Restart of a run after an out-of-memory error, with the first change that would fit."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from meshwright.launch.status import OUT_OF_MEMORY, OutOfMemoryError
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.terminal import printable
from meshwright.trainer.out_of_memory import read_page
from meshwright.trainer.state import AUTO

MOST_RETRIES = 4
"""The maximum number of restarts; every remedy needs less memory than the one before."""


def check_retry(retry: bool, *, alone: bool) -> None:
    """Raise `UserError` if this process cannot restart a run, because another launcher started it."""
    if retry and not alone:
        raise UserError(
            "--retry-oom: another launcher started this process, and only that launcher can restart all processes; "
            "start meshwright train once on each machine"
        )


def train_again(train: Callable[[Run, str | None], int], run: Run, resume: str | None, *, retry: bool) -> int:
    """The exit status of `train(run, resume)`; with `retry`, after an out-of-memory error, that of the run with a
    remedy.

    A remedy never changes the global batch or the order of samples.
    """
    run_dir, tried = Path(run.run_dir), set[tuple[str, ...]]()
    while True:
        before, _ = read_page(run_dir)
        try:
            status = train(run, resume)
        except OutOfMemoryError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
            status = error.status
        if status != OUT_OF_MEMORY or not retry:
            return status
        page, remedies = read_page(run_dir)
        fresh = [tuple(overrides) for overrides in remedies] if page != before else []
        chosen = next((overrides for overrides in fresh if overrides not in tried), None)
        if chosen is None or len(tried) == MOST_RETRIES:
            print("error: no further change to try (--retry-oom)", file=sys.stderr, flush=True)
            return status
        tried.add(chosen)
        print(f"starting again with {shlex.join(chosen)} (--retry-oom)", file=sys.stderr, flush=True)
        run, resume = parse_spec(dump_recipe(run), Run, chosen), AUTO
