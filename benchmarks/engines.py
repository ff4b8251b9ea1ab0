"""Our trainer beside a bare loop, Hugging Face's Trainer, Lightning Fabric and nanoGPT on the same work.

    python benchmarks/engines.py --nanogpt PATH/TO/nanoGPT --write benchmarks/results/NAME

Every engine runs in a process of its own, one after another, round after round, so that a machine whose speed drifts
drifts under all of them; what counts is the ratio of the medians over rounds. All start from the same weights and see
the same batches of the standard library's text; first losses stand in the table to show that the work is the same.
(Trainer's GPT-2 divides its loss by one label more than it has, and gets a label less per sequence; nanoGPT uses the
exact GELU.) Needs `pip install -e '.[bench]'`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from workload import Workload, arguments_for

HERE = Path(__file__).parent
ENGINES = {
    "meshwright": "meshwright_trainer",
    "bare": "bare_loop",
    "hf_trainer": "hf_trainer",
    "fabric": "fabric",
    "nanogpt": "nanogpt",
}


def main() -> int:
    """Measure, print the table, and write it where asked."""
    arguments = parse()
    engines = [name for name in arguments.engines if name != "nanogpt" or arguments.nanogpt]
    cells = {}
    for vocab in arguments.vocab:
        for precision in arguments.precision:
            workload = Workload(vocab=vocab, precision=precision, steps=arguments.steps, threads=arguments.threads)
            rounds = [
                {engine: run_engine(engine, workload, arguments.nanogpt) for engine in engines}
                for _ in range(arguments.rounds)
            ]
            cells[f"vocabulary {vocab}, {precision}"] = summarise(engines, rounds)
            print(table({name: cells[name] for name in [list(cells)[-1]]}), flush=True)
    if arguments.write:
        about = describe(arguments)
        arguments.write.with_suffix(".json").write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n")
        lines = [f"{name}: {value}" for name, value in about.items()]
        arguments.write.with_suffix(".md").write_text("\n".join([*lines, "", table(cells)]) + "\n")
    return 0


def run_engine(engine: str, workload: Workload, nanogpt: Path | None) -> dict:
    """What one engine's process reports; raises with its errors where it failed."""
    words = [sys.executable, "-m", f"engine.{ENGINES[engine]}", *arguments_for(workload)]
    if engine == "nanogpt":
        words += ["--nanogpt", str(nanogpt)]
    environment = os.environ | {
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": str(workload.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summarise(engines: list[str], rounds: list[dict[str, dict]]) -> dict[str, dict]:
    """Medians over rounds, and each engine's rate as a ratio to nanoGPT's (to the bare loop's without it)."""
    base = "nanogpt" if "nanogpt" in engines else "bare"
    summary = {}
    for engine in engines:
        reports = [one[engine] for one in rounds]
        rates = [report["tokens_per_s"] for report in reports]
        summary[engine] = {
            "tokens_per_s": statistics.median(rates),
            "slowest": min(rates),
            "fastest": max(rates),
            "peak_gib": statistics.median(report["peak_gib"] for report in reports),
            "first_step_s": statistics.median(report["first_step_s"] for report in reports),
            "losses": reports[0]["losses"],
        }
    for engine in engines:
        summary[engine][f"ratio_to_{base}"] = summary[engine]["tokens_per_s"] / summary[base]["tokens_per_s"]
        if "bare" in summary:
            summary[engine]["ratio_to_bare"] = summary[engine]["tokens_per_s"] / summary["bare"]["tokens_per_s"]
    return summary


def table(cells: dict[str, dict[str, dict]]) -> str:
    """A Markdown table per cell."""
    parts = []
    for name, engines in cells.items():
        parts += [
            f"\n{name}\n",
            "| engine | tok/s | range | x nanogpt | x bare | peak GiB | first step s | first, last loss |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for engine, row in engines.items():
            ratios = [f"{row[key]:.3f}" if key in row else "" for key in ("ratio_to_nanogpt", "ratio_to_bare")]
            first, last = row["losses"]
            parts.append(
                f"| {engine} | {row['tokens_per_s']:.0f} | {row['slowest']:.0f}-{row['fastest']:.0f} | {ratios[0]} | "
                f"{ratios[1]} | {row['peak_gib']:.2f} | {row['first_step_s']:.1f} | {first:.3f}, {last:.3f} |"
            )
    return "\n".join(parts)


def describe(arguments: argparse.Namespace) -> dict[str, str]:
    """Where and how the figures were measured."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else "unknown CPU"
    words = [word for word in sys.argv[1:] if word not in ("--nanogpt", str(arguments.nanogpt))]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "command": "python benchmarks/engines.py --nanogpt NANOGPT " + " ".join(words),
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
        "torch": torch.__version__,
        "rounds": str(arguments.rounds),
        "steps": str(arguments.steps),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="checkout of karpathy/nanoGPT; without it that engine is left out")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="which to run")
    parser.add_argument("--vocab", nargs="+", type=int, default=[4096, 50257], help="vocabulary sizes")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"], help="dtypes")
    parser.add_argument("--rounds", type=int, default=3, help="processes per engine and cell")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps per process, the first 4 not counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--write", type=Path, help="write PATH.json and PATH.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
