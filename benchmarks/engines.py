"""Our trainer compared with a bare loop, Hugging Face's Trainer, Lightning Fabric and nanoGPT on the same work.

    python benchmarks/engines.py --nanogpt PATH/TO/nanoGPT                # about a quarter of an hour on 2 cores
    python benchmarks/engines.py --nanogpt PATH/TO/nanoGPT --quick        # below 5 minutes

Every engine is a process of its own. All are alive together and take turns of a few steps, A B C C B A A B C ..., so
that a drift in the machine's speed affects all of them, and none always follows the same one; the result is the ratio
of the medians over all timed steps. All start from the same weights, see the same batches of the standard library's
text and train every token; the table shows first and last losses as evidence that the work is the same. (nanoGPT uses
the exact GELU, the others its approximation by tanh.) Every cell needs the memory of all engines together. Needs `pip
install -e '.[bench]'`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from workload import Workload, arguments_for

HERE = Path(__file__).parent
ENGINES = {
    "meshwright": "meshwright_trainer",
    "bare": "bare_loop",
    "hf_trainer": "hf_trainer",
    "fabric": "fabric",
    "nanogpt": "nanogpt",
}

PACKAGES = ("torch", "transformers", "accelerate", "lightning-fabric")


def main() -> int:
    """Measure, print the table, and write it."""
    arguments = parse()
    engines = [name for name in arguments.engines if name != "nanogpt" or arguments.nanogpt]
    hidden = ("--nanogpt", str(arguments.nanogpt))
    about, cells = describe(arguments, script="engines.py", hidden=hidden), {}
    for compiled in (False, True) if arguments.compile else (False,):
        for vocab in arguments.vocab:
            for precision in arguments.precision:
                workload = Workload(
                    vocab=vocab,
                    precision=precision,
                    rounds=arguments.rounds,
                    turn=arguments.turn,
                    warm_up=arguments.warm_up,
                    threads=arguments.threads,
                    compile=compiled,
                )
                name = f"vocabulary {vocab}, {precision}" + (", compiled" if compiled else "")
                starts = [partial(start, engine, workload, arguments.nanogpt) for engine in engines]
                cells[name] = summarise(measure(starts, workload.rounds), workload)
                print(table(name, cells[name]), flush=True)
    if arguments.write:
        about["load"] += f" before, {load()} after"
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.with_suffix(".json").write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n")
        text = [f"- {key}: {value}" for key, value in about.items()]
        text += [table(name, cell) for name, cell in cells.items()]
        arguments.write.with_suffix(".md").write_text("\n".join(text) + "\n")
        print(f"wrote {arguments.write.with_suffix('.md')} and .json")
    return 0


class Engine:
    """One engine's process, which computes only while this process waits for it."""

    def __init__(
        self, name: str, module: str, words: list[str], *, threads: int, packages: tuple[str, ...] = ()
    ) -> None:
        """Start `engine.MODULE` and let it make its warm-up steps; `packages` are folders with more libraries."""
        words = [sys.executable, "-m", f"engine.{module}", *words]
        paths = (str(HERE), os.environ.get("PYTHONPATH", ""), *packages)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )
        self.report = self.hear()  # the first step's time
        self.hear()  # the warm-up's
        self.turns: list[list[float]] = []

    def take_turn(self) -> None:
        """Let it make its next steps."""
        self.release()
        self.turns.append(self.hear()["seconds"])

    def finish(self) -> None:
        """Let it end, and take its final report."""
        self.release()
        self.report |= self.hear()
        self.process.wait()

    def release(self) -> None:
        """Allow it to compute."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        """Wait for its next line; raises its errors where it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"{self.name} failed:\n{self.errors.read()}")
        return json.loads(line)


def start(name: str, workload: Workload, nanogpt: Path | None) -> Engine:
    """The engine of a name, warmed up."""
    more = ["--nanogpt", str(nanogpt)] if name == "nanogpt" else []
    return Engine(name, ENGINES[name], [*arguments_for(workload), *more], threads=workload.threads)


def measure(starts: list[Callable[[], Engine]], rounds: int) -> list[Engine]:
    """The engines after all their turns."""
    engines: list[Engine] = []
    try:
        engines.extend(begin() for begin in starts)
        for number in range(rounds):
            for engine in engines if number % 2 == 0 else reversed(engines):
                engine.take_turn()
        for engine in engines:
            engine.finish()
    finally:
        for engine in engines:
            engine.process.kill()
    return engines


def summarise(engines: list[Engine], workload: Workload) -> dict[str, dict]:
    """Medians over all steps, and as ratios to nanoGPT's and to the bare loop's, with the range of single rounds."""
    medians = {engine.name: [statistics.median(turn) for turn in engine.turns] for engine in engines}
    summary = {}
    for engine in engines:
        seconds = statistics.median(second for turn in engine.turns for second in turn)
        row = {"tokens_per_s": workload.batch * workload.length / seconds, "seconds": engine.turns, **engine.report}
        summary[engine.name] = row
    for name, row in summary.items():
        for base in ("nanogpt", "bare"):
            if base in summary:
                rounds = [theirs / ours for theirs, ours in zip(medians[base], medians[name], strict=True)]
                row[f"ratio_to_{base}"] = row["tokens_per_s"] / summary[base]["tokens_per_s"]
                row[f"rounds_to_{base}"] = min(rounds), max(rounds)
    return summary


def table(name: str, rows: dict[str, dict]) -> str:
    """A cell as a Markdown table, and each engine's report of what it trained."""
    lines = [
        f"\n## {name}\n",
        "| engine | tok/s | x nanogpt (rounds) | x bare (rounds) | peak GiB | first step s | first, last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine, row in rows.items():
        ratios = []
        for base in ("nanogpt", "bare"):
            low, high = row.get(f"rounds_to_{base}", (0, 0))
            ratios.append(f"{row[f'ratio_to_{base}']:.3f} ({low:.2f}-{high:.2f})" if f"ratio_to_{base}" in row else "")
        first, last = row["losses"]
        lines.append(
            f"| {engine} | {row['tokens_per_s']:.0f} | {ratios[0]} | {ratios[1]} | {row['peak_gib']:.2f} | "
            f"{row['first_step_s']:.1f} | {first:.4f}, {last:.4f} |"
        )
    return "\n".join([*lines, "", *(f"- {engine}: {row['about']}" for engine, row in rows.items())])


def describe(arguments: argparse.Namespace, *, script: str, hidden: tuple[str, ...]) -> dict[str, str]:
    """Where and how the figures were measured; `hidden` command-line words are private paths."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else "unknown CPU"
    words = [word for word in sys.argv[1:] if word not in hidden]
    folder = [f"{hidden[0]} FOLDER"] if hidden[0] in sys.argv else []
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "command": " ".join([f"python benchmarks/{script}", *folder, *words]),
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
        "load": load(),
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "steps": f"{arguments.rounds} rounds of {arguments.turn}, after {arguments.warm_up} of warm-up",
    }


def load() -> str:
    """The load average over the last minute; it should be below 0.5 before a measurement."""
    return f"{os.getloadavg()[0]:.1f}"


def parse() -> argparse.Namespace:
    """The command line."""
    results = HERE / "results" / f"{datetime.now(UTC).date().isoformat()}-engines"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--nanogpt", type=Path, help="checkout of karpathy/nanoGPT; without it that engine is left out")
    option("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="which to run")
    option("--vocab", nargs="+", type=int, default=[4096, 50257], help="vocabulary sizes")
    option("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"], help="dtypes")
    option("--compile", action="store_true", help="measure every cell again with torch.compile on for all engines")
    option("--rounds", type=int, default=8, help="turns of each engine")
    option("--turn", type=int, default=3, help="steps of a turn")
    option("--warm-up", type=int, default=4, help="steps before the first turn")
    option("--threads", type=int, default=2, help="CPU threads")
    option("--quick", action="store_true", help="2 rounds of 2 steps after 2 of warm-up")
    option("--write", type=Path, default=results, help="write PATH.json and PATH.md (default: results/DATE-engines)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.turn, arguments.warm_up = 2, 2, 2
    return arguments


if __name__ == "__main__":
    sys.exit(main())
