"""Processor seconds of a forward and a backward pass, ours and nanoGPT's, in turns on one thread of one process.

    python benchmarks/processor_seconds.py --nanogpt PATH/TO/nanoGPT

`engines.py` compares whole training programs by the clock, on a machine without other work. Processor time of one
thread depends less on other programs, so this compares on a busy machine: A B B A A B ..., the ratio of the medians,
and the range of ratios of single turns. Ours computes by the kernels that it would choose, by the fixed ones, and in
bf16 with bf16 weights, as our trainer does; nanoGPT by its own modules under its own autocast. Without `--nanogpt` the
chosen kernels are compared with the fixed ones alone. `--operations 8` prints besides where the time goes: the longest
operations of both, each the least of all turns.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workload import Workload

from meshwright.families import hf_tensors
from meshwright.models.cpu_kernels import FIXED
from meshwright.models.kernel_choice import MeasuredKernels, here, measure, using
from meshwright.spec.batch import Batch
from meshwright.trainer.device import keep_freed_memory

Step = Callable[[], None]


def main() -> None:
    """Print a table with a row for each vocabulary and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="folder of nanoGPT's model.py")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50257])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--operations", type=int, default=0, help="how many operations to list")
    arguments = parser.parse_args()
    beside = arguments.nanogpt is not None
    if beside:
        sys.path.insert(0, str(arguments.nanogpt))
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{here()}\n")
    other = "nanogpt" if beside else "fixed"
    columns = ("vocabulary", "precision", "chosen", "ours s", "fixed s", f"{other} s", f"x {other} (turns)")
    columns += ("fixed x nanogpt",) if beside else ()
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for vocab in arguments.vocab:
        for precision in arguments.precision:
            workload = Workload(vocab, precision, 1, 1, 0, batch=arguments.batch)
            print(compare(workload, arguments.turns, beside=beside), flush=True)
            if arguments.operations:
                print(f"\n{operations(workload, arguments, beside=beside)}\n", flush=True)


def steps_of(workload: Workload, measured: MeasuredKernels, *, beside: bool) -> dict[str, Step]:
    """Our pass by the measured kernels and by the fixed ones, and nanoGPT's, each made once."""
    inputs, labels = (torch.randint(0, 4096, (workload.batch, workload.length)) for _ in range(2))
    steps = {"ours": ours(workload, inputs, labels, measured), "fixed": ours(workload, inputs, labels, None)}
    if beside:
        steps["nanogpt"] = nanogpt(workload, inputs, labels)
    for step in steps.values():
        step()
    return steps


def compare(workload: Workload, turns: int, *, beside: bool) -> str:
    """A row of the table; `beside` nanoGPT."""
    measured = measure(workload.shapes)
    steps = steps_of(workload, measured, beside=beside)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        for name in sorted(steps, reverse=bool(turn % 2)):
            began = time.thread_time()
            steps[name]()
            seconds[name].append(time.thread_time() - began)
    other = "nanogpt" if beside else "fixed"
    mine, fixed, theirs = (statistics.median(seconds[name]) for name in ("ours", "fixed", other))
    single = [b / a for a, b in zip(seconds["ours"], seconds[other], strict=True)]
    return (
        f"| {workload.vocab} | {workload.precision} | {measured.chosen} | {mine:.3f} | {fixed:.3f} | {theirs:.3f} | "
        f"{theirs / mine:.2f} ({min(single):.2f}-{max(single):.2f}) |{f' {theirs / fixed:.2f} |' if beside else ''}"
    )


class Timed(TorchDispatchMode):
    """Records the name and the processor seconds of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, time.thread_time() - began))
        return result


def operations(workload: Workload, arguments: argparse.Namespace, *, beside: bool) -> str:
    """A table of the longest operations: milliseconds of a pass."""
    steps = steps_of(workload, measure(workload.shapes), beside=beside)
    spent = {name: spent_by(steps[name], arguments.turns) for name in steps if name != "fixed"}
    longest = sum(spent.values(), Counter()).most_common(arguments.operations)
    rows: list[Sequence[str]] = [("operation", *(f"{name} ms" for name in spent)), ["---"] * (1 + len(spent))]
    rows += [(name, *(f"{1e3 * times[name]:.1f}" for times in spent.values())) for name, _ in longest]
    rows.append(("all", *(f"{1e3 * sum(times.values()):.1f}" for times in spent.values())))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spent_by(step: Step, turns: int) -> Counter[str]:
    """Processor seconds of a pass by operation; of each call the least of all turns."""
    passes = []
    for _ in range(turns):
        with Timed() as timed:
            step()
        passes.append(timed.calls)
    spent = Counter[str]()
    for calls in zip(*passes, strict=True):
        spent[calls[0][0]] += min(seconds for _, seconds in calls)
    return spent


def ours(workload: Workload, inputs: torch.Tensor, labels: torch.Tensor, measured: MeasuredKernels | None) -> Step:
    """Our module's forward and backward pass, by the kernels measured, or by the fixed ones."""
    model = workload.model()
    if workload.precision == "bf16":
        model.bfloat16()

    def step() -> None:
        with using(FIXED if measured is None else measured.kernels):
            loss = model(Batch(inputs, labels), lambda x, head, batch: head.loss(x, batch.labels)) / labels.numel()
            loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def nanogpt(workload: Workload, inputs: torch.Tensor, labels: torch.Tensor) -> Step:
    """nanoGPT's forward and backward pass, from our weights."""
    from model import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    config = GPTConfig(workload.length, workload.vocab, workload.layers, workload.heads, workload.width, 0.0, True)
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(config)
    theirs, places = dict(model.named_parameters()), hf_tensors(workload.spec)
    with torch.no_grad():
        for name, tensor in workload.model().named_parameters():
            place = places[name]
            theirs[place.key][place.offset : place.offset + len(tensor)].copy_(tensor)
    low = workload.precision == "bf16"

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            _, loss = model(inputs, labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
