"""The one place that kills training at random moments and looks at what is left: `python -m meshwright.testing.kills`.

A child trains a tiny model, saving every few steps on storage that is made slow, so that many kills hit a save. After
each kill -9 the newest checkpoint must be good, must be the last that was begun or the one before it, and must hold the
state that an undisturbed run has at its step, bit for bit. The next child continues from it.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.manifest import list_checkpoints, step_of
from meshwright.checkpoint.verify import newest_good_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.testing.faults import slow_storage

EVERY = 3
STEP_SECONDS, STORAGE_SECONDS = 0.004, 0.003
"""Wall time of a step, and of each file operation."""


def fresh_state() -> dict[str, torch.Tensor]:
    """The state before the first step: some tensors of a model and its optimizer."""
    return {"model.a": torch.zeros(50, 7, dtype=torch.float64), "optimizer.a.m": torch.ones(50, 7, dtype=torch.float64)}


def advance(state: dict[str, torch.Tensor], step: int) -> None:
    """One step: every number depends on all steps before, so that a lost or repeated one shows."""
    state["optimizer.a.m"].mul_(0.9).add_(step % 7)
    state["model.a"].mul_(1.01).sub_(state["optimizer.a.m"], alpha=0.1)


def state_at(step: int) -> dict[str, torch.Tensor]:
    """The undisturbed run's state after `step` steps."""
    state = fresh_state()
    for done in range(1, step + 1):
        advance(state, done)
    return state


def train_forever(root: Path, progress: Path) -> None:
    """Continue from the newest checkpoint and never stop; writes the steps whose save was begun to `progress`."""
    state, step = fresh_state(), 0
    found, faults = newest_good_checkpoint(root)
    assert not faults, faults
    if found is not None:
        load_tensors(found, state)
        step = step_of(found)
    slow_storage(root, STORAGE_SECONDS)
    writer = CheckpointWriter(root, CheckpointSpec(every=EVERY, keep_last=2))
    with progress.open("w") as told:
        while True:
            step += 1
            advance(state, step)
            time.sleep(STEP_SECONDS)
            if not writer.busy:
                writer.settle()
            if step % EVERY == 0 and writer.idle:
                writer.begin(step, state, {"step": step})
                told.write(f"{step}\n")
                told.flush()


def storm(
    folder: Path, *, kills: int, seed: int = 0, report: Callable[[str], None] = lambda text: None
) -> Counter[str]:
    """Kill a child `kills` times; what the kills hit, by the name of what was found in the folder.

    Raises `AssertionError` where anything is lost that must not be.
    """
    root, progress, draw = folder / "checkpoints", folder / "progress", random.Random(seed)
    hit: Counter[str] = Counter()
    newest = 0
    for count in range(kills):
        child = os.fork()
        if child == 0:
            try:
                train_forever(root, progress)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child had failed before"
        begun = [int(line) for line in progress.read_text().split()] if progress.exists() else []
        names = [path.name for path in root.iterdir()] if root.exists() else []
        hit["inside a save" if any(name.startswith(".") for name in names) else "between saves"] += 1
        found, faults = newest_good_checkpoint(root)
        assert not faults, faults
        step = step_of(found) if found else 0
        completed = [newest, *begun][-2] if begun else newest
        assert step >= completed, f"kill {count}: step {step} is newest, but {completed} had been saved"
        if found is not None:
            state = fresh_state()
            load_tensors(found, state)
            expected = state_at(step)
            assert all(torch.equal(state[name], expected[name]) for name in expected), f"kill {count}: step {step}"
            assert found == list_checkpoints(root)[-1]
        newest = step
        report(f"kill {count + 1} of {kills}: {begun[-1:] or 'nothing'} begun, step {step} is newest and good")
    hit["steps kept"] = newest
    return hit


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="meshwright.testing.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how often")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="meshwright-kills-") as folder:
        hit = storm(Path(folder), kills=arguments.kills, seed=arguments.seed, report=print)
    print(", ".join(f"{what}: {count}" for what, count in hit.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
