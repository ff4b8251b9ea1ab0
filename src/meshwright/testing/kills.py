"""Random kills of training, and a check of the remaining checkpoints: `python -m meshwright.testing.kills`.

Some ranks train a tiny model and save every few steps on slowed storage, so that many kills hit a save. One rank is
killed by kill -9; a moment later the others are killed, as by the launcher. Then the newest checkpoint must be good,
must be the last that was begun or the one before it, and must equal an undisturbed run's state at its step bit for bit.
A different number of ranks continues from it.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.checkpoint.dcp import load_tensors, local_part
from meshwright.checkpoint.manifest import list_checkpoints, step_of
from meshwright.checkpoint.verify import newest_good_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.comm.objects import largest
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.testing.faults import slow_storage

EVERY = 3
STEP_SECONDS, STORAGE_SECONDS = 0.004, 0.003
"""Wall time of a step, and of each file operation."""


def fresh_state() -> dict[str, torch.Tensor]:
    """The state before the first step: some tensors of a model and its optimizer."""
    return {"model.a": torch.zeros(50, 7, dtype=torch.float64), "optimizer.a.m": torch.ones(50, 7, dtype=torch.float64)}


def advance(state: dict[str, torch.Tensor], step: int) -> None:
    """One step: every number depends on all earlier steps, so that a lost or repeated one shows."""
    state["optimizer.a.m"].mul_(0.9).add_(step % 7)
    state["model.a"].mul_(1.01).sub_(state["optimizer.a.m"], alpha=0.1)


def state_at(step: int) -> dict[str, torch.Tensor]:
    """The undisturbed run's state after `step` steps."""
    state = fresh_state()
    for done in range(1, step + 1):
        advance(state, done)
    return state


def train_forever(root: Path, progress: Path, rank: int, world_size: int) -> None:
    """Continue from the newest checkpoint and never stop; rank 0 records in `progress` the steps that it saves."""
    state: dict[str, torch.Tensor] = fresh_state()
    step = 0
    if world_size > 1:
        store = dist.FileStore(f"{progress}.store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        for name, whole in fresh_state().items():
            state[name] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    checkpoint, faults = newest_good_checkpoint(root)
    assert not faults, faults
    if checkpoint is not None:
        load_tensors(checkpoint, state)
        step = step_of(checkpoint)
    slow_storage(root, STORAGE_SECONDS)
    writer = CheckpointWriter(root, CheckpointSpec(every=EVERY, keep_last=2))
    mine = {name: local_part(tensor) for name, tensor in state.items()}
    with (progress if rank == 0 else Path(os.devnull)).open("w") as journal:
        while True:
            step += 1
            advance(mine, step)
            time.sleep(STEP_SECONDS)
            (writing,) = largest(writer.busy)
            if not writing:
                writer.settle()
            if step % EVERY == 0 and writer.idle:
                writer.begin(step, state, {"step": step})
                journal.write(f"{step}\n")
                journal.flush()


def kill_once(root: Path, progress: Path, draw: random.Random, world_size: int) -> list[int]:
    """Start ranks, kill one and then the others at a random moment; returns the steps whose save had begun."""
    for path in (progress, Path(f"{progress}.store")):
        path.unlink(missing_ok=True)
    children: list[int] = []
    for rank in range(world_size):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                train_forever(root, progress, rank, world_size)
            finally:
                os._exit(1)
    in_start_up, saves = draw.random() < 0.1, draw.randrange(4)
    while not in_start_up and len(saves_begun(progress)) < saves:  # even on a slow machine
        time.sleep(0.002)
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "rank 0 had failed before"
    time.sleep(draw.uniform(0.0, 0.3 if in_start_up else 0.15))
    draw.shuffle(children)
    for number, child in enumerate(children):
        assert number or os.waitpid(child, os.WNOHANG) == (0, 0), "a rank had failed before"
        os.kill(child, signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.05) if number < len(children) - 1 else 0)
    for child in children:
        os.waitpid(child, 0)
    return saves_begun(progress)


def saves_begun(progress: Path) -> list[int]:
    """The steps of saves begun since the last start."""
    return [int(line) for line in progress.read_text().splitlines()] if progress.exists() else []


def storm(
    folder: Path,
    *,
    kills: int,
    ranks: Sequence[int] = (1,),
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """Kill the ranks `kills` times, with numbers of ranks in turn; returns how often each phase was hit, and the saved
    steps.

    Raises `AssertionError` if anything is lost that must not be.
    """
    root, progress, draw = folder / "checkpoints", folder / "progress", random.Random(seed)
    hit: Counter[str] = Counter()
    newest = 0
    for count in range(kills):
        world_size = ranks[count % len(ranks)]
        begun = kill_once(root, progress, draw, world_size)
        names = [path.name for path in root.iterdir()] if root.exists() else []
        hit["inside a save" if any(name.startswith(".") for name in names) else "between saves"] += 1
        checkpoint, faults = newest_good_checkpoint(root)
        assert not faults, faults
        step = step_of(checkpoint) if checkpoint else 0
        completed = [newest, *begun][-2] if begun else newest
        assert step >= completed, f"kill {count}: step {step} is newest, but {completed} had been saved"
        if checkpoint is not None:
            state = fresh_state()
            load_tensors(checkpoint, state)
            expected = state_at(step)
            assert all(torch.equal(state[name], expected[name]) for name in expected), f"kill {count}: step {step}"
            assert checkpoint == list_checkpoints(root)[-1]
        newest = step
        last = begun[-1] if begun else "none"
        report(f"kill {count + 1} of {kills}, ranks {world_size}: last save begun {last}, step {step} newest and good")
    hit["steps kept"] = newest
    return hit


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="meshwright.testing.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how often")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 2, 3], help="how many, in turns")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="meshwright-kills-") as folder:
        hit = storm(Path(folder), kills=arguments.kills, ranks=arguments.ranks, seed=arguments.seed, report=print)
    print(", ".join(f"{what}: {count}" for what, count in hit.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
