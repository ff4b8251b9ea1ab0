"""Saving and loading compared with torch's `dcp.save`, `dcp.async_save` and `dcp.load`: `python
benchmarks/checkpoints.py`.

All save the same tensors to the same folder, in turns; a figure is the median over rounds, a comparison the median of
the ratios within a round. `blocked` is the time until training could continue, `total` the time until the checkpoint is
complete and on disk. Ours includes checksums, manifest and publication, and our loading verifies every file first;
torch's does neither.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.spec.checkpoint import CheckpointSpec

Times = tuple[float, float]
"""Seconds blocked, seconds in total."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which dcp.async_save insists on
    count = max(1, arguments.megabytes // 4)
    tensors = {f"model.layers.{i}.weight": torch.randn(1000, 1000) for i in range(count)}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=arguments.folder) as name:
        folder = Path(name)
        writers = {mode: CheckpointWriter(folder / mode, CheckpointSpec(asynchronous=mode == "async", keep_last=1))
                   for mode in ("async", "sync")}  # fmt: skip
        saves: dict[str, Callable[[int], Times]] = {
            "ours, asynchronous": lambda step: ours(writers["async"], step, tensors),
            "dcp.async_save": lambda step: torch_async(folder / "theirs-async", tensors),
            "ours, synchronous": lambda step: ours(writers["sync"], step, tensors),
            "dcp.save": lambda step: torch_sync(folder / "theirs", tensors),
        }
        times: dict[str, list[Times]] = {name: [] for name in saves}
        loads: dict[str, list[float]] = {"ours, verified": [], "dcp.load": []}
        for step in range(arguments.rounds + 1):
            for name in list(saves)[:: 1 if step % 2 else -1]:  # there and back, so that none is always first
                times[name].append(saves[name](step))
            newest = sorted((folder / "async").glob("step-*"))[-1]
            loads["ours, verified"].append(timed(lambda newest=newest: load_ours(newest, tensors)))
            loads["dcp.load"].append(timed(lambda: dcp.load(dict(tensors), checkpoint_id=folder / "theirs")))
    show(arguments.megabytes, {name: seen[1:] for name, seen in times.items()}, loads)  # the first round warms up
    dist.destroy_process_group()


def ours(writer: CheckpointWriter, step: int, tensors: dict[str, torch.Tensor]) -> Times:
    writer.begin(step, tensors, {"step": step})
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.problem is None
    asynchronous = writer.spec.asynchronous
    return (outcome.blocked_seconds if asynchronous else outcome.total_seconds), outcome.total_seconds


def torch_async(folder: Path, tensors: dict[str, torch.Tensor]) -> Times:
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    future = dcp.async_save(dict(tensors), checkpoint_id=folder)
    blocked = time.perf_counter() - began
    assert isinstance(future, Future)
    future.result()
    return blocked, time.perf_counter() - began


def torch_sync(folder: Path, tensors: dict[str, torch.Tensor]) -> Times:
    shutil.rmtree(folder, ignore_errors=True)
    total = timed(lambda: dcp.save(dict(tensors), checkpoint_id=folder))
    return total, total


def load_ours(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    verify_checkpoint(checkpoint)
    load_tensors(checkpoint, tensors)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(megabytes: int, times: dict[str, list[Times]], loads: dict[str, list[float]]) -> None:
    print(f"\n{megabytes} MB, one process, {len(times['dcp.save'])} rounds; torch {torch.__version__}\n")
    print("| save | blocked (s) | total (s) |\n|---|---|---|")
    for name, seen in times.items():
        print(f"| {name} | {statistics.median(t[0] for t in seen):.3f} | {statistics.median(t[1] for t in seen):.3f} |")
    for mine, theirs in (("ours, asynchronous", "dcp.async_save"), ("ours, synchronous", "dcp.save")):
        for index, what in enumerate(("blocked", "total")):
            ratio = statistics.median(a[index] / b[index] for a, b in zip(times[mine], times[theirs], strict=True))
            print(f"{what}: {mine} / {theirs} = {ratio:.2f}")
    ratio = statistics.median(a / b for a, b in zip(*loads.values(), strict=True))
    print(f"load: {', '.join(f'{name} {statistics.median(seen):.3f} s' for name, seen in loads.items())}; {ratio:.2f}")


if __name__ == "__main__":
    main()
