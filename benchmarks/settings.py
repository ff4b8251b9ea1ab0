"""Settings beside their absence, in turns: seconds and CPU seconds of a step, and peak memory of the process.

`PYTHONPATH=src:benchmarks python -P benchmarks/settings.py [--rounds N] [--only WORD] [--batch N]` trains one small
model on a CPU, on one process or on two under ZeRO-3, each time in processes of their own: the recipe as it is, then
with one setting changed, and so on, in every round again. A step has `--batch` sequences, in two microbatches. The
result is a table of medians; of two ranks the slower one's wall time, the larger one's memory and both ones' CPU time.
Files of offloaded state are in TMPDIR. CPU time is told beside wall time because a machine may be busy with other work.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = """
model: {family: llama, hidden: 256, num_layers: 4, num_heads: 8, num_kv_heads: 4, ffn: 768, vocab: 4096}
data: {sequence_length: 128}
training: {precision: bf16, lr_schedule: {warmup: 0}}
device: cpu
"""
SETTINGS: dict[str, list[str]] = {
    "precision: fp32": ["training.precision=fp32"],
    "precision: fp8 (tensorwise)": ["training.precision=fp8"],
    "precision: fp8 (rowwise)": ["training.precision=fp8", "training.low_precision.recipe=rowwise"],
    "precision: fp8 (blockwise)": ["training.precision=fp8", "training.low_precision.recipe=blockwise"],
    "precision: fp8 (delayed)": ["training.precision=fp8", "training.low_precision.recipe=delayed"],
    "precision: mxfp8": ["training.precision=mxfp8"],
    "precision: nvfp4": ["training.precision=nvfp4"],
    "reduce_dtype: bf16": ["training.reduce_dtype=bf16"],
    "optimizer: adamw_8bit": ["training.optimizer.name=adamw_8bit"],
    "optimizer: muon": ["training.optimizer.name=muon"],
    "state_dtype: bf16": ["training.optimizer.state_dtype=bf16"],
    "master_dtype: bf16, stochastic": ["training.master_dtype=bf16"],
    "master_dtype: bf16, kahan": ["training.master_dtype=bf16", "training.optimizer.rounding=kahan"],
    "both in bf16, stochastic": ["training.master_dtype=bf16", "training.optimizer.state_dtype=bf16"],
    "recompute: selective": ["training.recompute=selective"],
    "recompute: full": ["training.recompute=full"],
    "attention: flash": ["training.attention=flash"],
    "attention: math": ["training.attention=math"],
    "clip: null": ["training.clip=null"],
    "compile: true": ["training.compile=true"],
    "compile_scope: model": ["training.compile=true", "training.compile_scope=model"],
}
ABSENT = "the recipe as it is"
OFFLOAD = "layout.offload="
RANKS: dict[str, list[str]] = {
    "zero: 1": ["layout.zero=1"],
    "zero: 2": ["layout.zero=2"],
    "quantized_weights: int8": ["layout.quantized_weights=int8"],
    "quantized_weights: fp8": ["training.precision=fp8", "layout.quantized_weights=fp8"],
    "quantized_gradients: int8": ["layout.quantized_gradients=int8"],
    "quantized_gradients: int4": ["layout.quantized_gradients=int4"],
    "quantized_gradients: int4, error feedback": [
        "layout.quantized_gradients=int4",
        "layout.gradient_error_feedback=true",
    ],
    "offload: {optimizer: host}": [OFFLOAD + "{optimizer: host}"],
    "offload: {optimizer: disk}": [OFFLOAD + "{optimizer: disk}"],
    "offload: cpu": [OFFLOAD + "cpu"],
    "offload: {optimizer: disk, parameters: disk}": [OFFLOAD + "{optimizer: disk, parameters: disk}"],
    "offload: {activations: host}": [OFFLOAD + "{activations: host}"],
}
"""Settings beside ZeRO-3 over two ranks."""
SHARDED, TWO = "ZeRO-3 over two ranks", ["layout.dp_shard=2"]
WARM_UP, STEPS, THREADS, EVERY = 2, 5, 1, 4


def one(overrides: list[str], batch: int) -> dict[str, Any]:
    """Train in this process; medians over steps, and its peak memory beyond what it held before the model."""
    from meshwright.families import resolve_model
    from meshwright.spec.recipe import parse_spec
    from meshwright.spec.run import ResolvedRun, Run
    from meshwright.storage.scratch import scratch_folder
    from meshwright.testing.ranks import RankPool

    with scratch_folder("settings") as folder:
        run = parse_spec(RECIPE, Run, [*overrides, f"run_dir={folder}"])
        ranks = run.layout.world_size
        resolved = ResolvedRun(
            run=run,
            model=resolve_model(run.model, base_dir=Path()),
            reasons={},
            global_batch=batch,
            micro_batch=batch // 2 // ranks,
            accumulation=2,
        )
        if ranks == 1:
            return on_this_rank(resolved)
        found = RankPool().run(ranks, on_this_rank, resolved, timeout=200)
    return {
        "wall": max(rank["wall"] for rank in found),
        "cpu": sum(rank["cpu"] for rank in found),
        "memory": max(rank["memory"] for rank in found),
    }


def on_this_rank(resolved: Any) -> dict[str, Any]:
    """The measurements of one rank."""
    import torch

    from meshwright.testing.equivalence import build_here, loader_for

    torch.set_num_threads(THREADS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = build_here(resolved)
    walls, cpus = [], []
    with loader_for(trainer) as loader:
        for step in range(1, WARM_UP + STEPS + 1):
            batches = list(loader.microbatches(step - 1))
            wall, cpu = time.perf_counter(), time.process_time()
            trainer.train_step(step, batches)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "wall": statistics.median(walls[WARM_UP:]),
        "cpu": statistics.median(cpus[WARM_UP:]),
        "memory": peak / 1024,
    }


def measure(rounds: int, only: str, batch: int) -> dict[str, list[dict[str, float]]]:
    """The measurements of every setting, and those without any, which come before every fourth setting."""
    alone, shared = ([name for name in table if only in name] for table in (SETTINGS, RANKS))
    words_of = {ABSENT: [], SHARDED: TWO, **SETTINGS} | {name: [*TWO, *words] for name, words in RANKS.items()}
    turns = [(number, name, ABSENT) for number, name in enumerate(alone)]
    turns += [(number, name, SHARDED) for number, name in enumerate(shared)]
    found: dict[str, list[dict[str, float]]] = {turn: [] for _, name, absent in turns for turn in (absent, name)}
    for _ in range(rounds):
        for number, name, absent in turns:
            for turn in (absent, name) if number % EVERY == 0 else (name,):
                words = [sys.executable, "-P", __file__, "--batch", str(batch)]
                words += ["--one", json.dumps(words_of[turn])]
                ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                found[turn].append(json.loads(ended.stdout.splitlines()[-1]))
                print(f"{turn}: {found[turn][-1]}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and ratios to the recipe as it is, as Markdown."""

    def median(name: str, figure: str) -> float:
        return statistics.median(run[figure] for run in found[name])

    rows = [
        "| setting | CPU s a step | ratio | wall s a step | ratio | peak MiB | more |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in found:
        cpu, wall, memory = (median(name, figure) for figure in ("cpu", "wall", "memory"))
        absent = SHARDED if name in (SHARDED, *RANKS) else ABSENT
        times = cpu / median(absent, "cpu"), wall / median(absent, "wall")
        more = memory - median(absent, "memory")
        rows.append(
            f"| {name} | {cpu:.3f} | {times[0]:.2f} | {wall:.3f} | {times[1]:.2f} | {memory:.0f} | {more:+.0f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help="how often every setting has its turn")
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, a multiple of 4")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given.one, given.batch)))
    else:
        print(table(measure(given.rounds, given.only, given.batch)))
