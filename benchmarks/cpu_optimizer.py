"""The optimizer's step on a CPU, ours beside DeepSpeed's CPUAdam, in turns; the interpreter must have DeepSpeed.

    DS_ACCELERATOR=cpu PYTHONPATH=src PYTHON -P benchmarks/cpu_optimizer.py

Both update the same fp32 tensors from the same gradients, with all cores; DeepSpeed's kernel is compiled at first use.
Results must agree to fp32's rounding before anything is timed. Prints medians of the times, and of the
ratios of neighbouring turns, which a busy machine changes less than either time.
"""

import argparse
import os
import statistics
import sys
import time
from importlib import import_module

import torch

from meshwright.optim.adamw import ShardedAdamW

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(millions: int, matrix: int) -> list[torch.nn.Parameter]:
    """Matrices of about a million numbers each, with gradients."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(max(1, millions * 10**6 // matrix)):
        found.append(torch.nn.Parameter(torch.randn(matrix, generator=generator)))
        found[-1].grad = torch.randn(matrix, generator=generator)
    return found


def seconds(optimizer: torch.optim.Optimizer) -> float:
    """Of one step."""
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--millions", type=int, nargs="+", default=[10, 100])
    words.add_argument("--turns", type=int, default=15)
    asked = words.parse_args()
    try:
        cpu_adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    except ImportError as error:
        sys.exit(f"this interpreter has no DeepSpeed ({error}): pip install deepspeed")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print("| parameters, millions | ours, ms | CPUAdam, ms | ours / CPUAdam |\n|---|---|---|---|")
    for millions in asked.millions:
        ours, theirs = (parameters(millions, 2**20) for _ in range(2))
        fused = ShardedAdamW([{"params": ours, "weight_decay": 0.1}], **SETTINGS)
        deepspeed = cpu_adam(theirs, weight_decay=0.1, adamw_mode=True, **SETTINGS)
        for _ in range(2):
            seconds(fused)
            seconds(deepspeed)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        turns = [(seconds(fused), seconds(deepspeed)) for _ in range(asked.turns)]
        mine, other = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median(one / two for one, two in turns)
        print(f"| {millions} | {1e3 * mine:.0f} | {1e3 * other:.0f} | {ratio:.2f} |")
    print(f"\n{torch.get_num_threads()} threads; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
