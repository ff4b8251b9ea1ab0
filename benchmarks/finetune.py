"""Our fine-tuning compared with peft under transformers' Trainer and trl's SFTTrainer on the same work.

    python benchmarks/finetune.py --trl FOLDER    # where trl was put: pip install --target FOLDER --no-deps trl

LoRA and QLoRA, with records packed into rows as separate documents, and with a row for each. Engines are alive together
and take turns as in `engines.py`; all start from the same base, see the same rows in the same order, and train adapters
of the same sizes; the table shows first and last losses as evidence that the work is the same (fresh adapters are drawn
differently). Tokens of records count, padding does not. Needs `pip install -e '.[bench,qlora]' peft`.
"""

import argparse
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path

from engines import Engine, describe, load, measure
from tuning import Tuning, arguments_for, prepare

ENGINES = {"meshwright": "meshwright_tuning", "peft": "peft_trainer", "trl": "trl_trainer"}
CELLS = {
    f"{method}{'-packed' if packed else ''}": (method, packed)
    for method in ("lora", "qlora")
    for packed in (True, False)
}


def main() -> int:
    """Measure, print the tables, and write them."""
    arguments = parse()
    engines = [name for name in arguments.engines if name != "trl" or arguments.trl]
    facts, cells = about(arguments), {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for method, packed in map(CELLS.__getitem__, arguments.cells):
            work = Tuning(
                folder=folder,
                method=method,
                packed=packed,
                precision=arguments.precision,
                rounds=arguments.rounds,
                turn=arguments.turn,
                warm_up=arguments.warm_up,
                threads=arguments.threads,
            )
            starts = [partial(start, name, work, arguments.trl) for name in engines]
            name = f"{method}, {'records packed and kept apart' if packed else 'a row for each record'}"
            cells[name] = summarise(measure(starts, work.rounds), work)
            print(table(name, cells[name]), flush=True)
    if arguments.write:
        facts["load"] += f" before, {load()} after"
        text = ["# Fine-tuning side by side", "", *(f"- {key}: {value}" for key, value in facts.items())]
        text += [table(name, cell) for name, cell in cells.items()]
        arguments.write.with_suffix(".md").write_text("\n".join(text) + "\n")
        print(f"wrote {arguments.write.with_suffix('.md')}")
    return 0


def start(name: str, work: Tuning, trl: Path | None) -> Engine:
    """The engine of a name, warmed up."""
    packages = (str(trl),) if name == "trl" else ()
    return Engine(name, ENGINES[name], arguments_for(work), threads=work.threads, packages=packages)


def summarise(engines: list[Engine], work: Tuning) -> dict[str, dict]:
    """Each engine's tokens a second over all timed steps, and ours over its, with the range of single rounds."""
    tokens = work.tokens()[work.warm_up :]
    summary = {}
    for engine in engines:
        seconds = [second for turn in engine.turns for second in turn]
        speeds = [count / second for count, second in zip(tokens, seconds, strict=True)]
        rounds = [speeds[first : first + work.turn] for first in range(0, len(speeds), work.turn)]
        speed = statistics.median(speeds)
        summary[engine.name] = {"tokens_per_s": speed, "rounds": list(map(statistics.median, rounds)), **engine.report}
    ours = summary[engines[0].name]
    for row in summary.values():
        ratios = [mine / theirs for mine, theirs in zip(ours["rounds"], row["rounds"], strict=True)]
        row["ours"] = ours["tokens_per_s"] / row["tokens_per_s"], min(ratios), max(ratios)
    return summary


def table(name: str, rows: dict[str, dict]) -> str:
    """A cell as a Markdown table, and each engine's report of what it trained."""
    lines = [
        f"\n## {name}\n",
        "| engine | tok/s | ours : it (rounds) | peak GiB | first step s | first, last loss |",
        "|---|---|---|---|---|---|",
    ]
    for engine, row in rows.items():
        ratio, low, high = row["ours"]
        first, last = row["losses"]
        lines.append(
            f"| {engine} | {row['tokens_per_s']:.0f} | {ratio:.2f} ({low:.2f}-{high:.2f}) | {row['peak_gib']:.2f} | "
            f"{row['first_step_s']:.1f} | {first:.4f}, {last:.4f} |"
        )
    return "\n".join([*lines, "", *(f"- {engine}: {row['about']}" for engine, row in rows.items())])


def about(arguments: argparse.Namespace) -> dict[str, str]:
    """Where, how and with which versions the figures were measured."""
    facts = describe(arguments, script="finetune.py", hidden=("--trl", str(arguments.trl)))
    versions = [f"peft {version('peft')}", f"bitsandbytes {version('bitsandbytes')}"]
    if arguments.trl:
        versions += [f"trl {d.version}" for d in distributions(path=[str(arguments.trl)]) if d.name == "trl"]
    return facts | {"versions": ", ".join([facts["versions"], *versions]), "precision": arguments.precision}


def parse() -> argparse.Namespace:
    """The command line."""
    results = Path(__file__).parent / "results" / f"{datetime.now(UTC).date().isoformat()}-finetune"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--trl", type=Path, help="folder where trl is installed; without it that engine is left out")
    option("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="which to run, ours first")
    option("--cells", nargs="+", default=list(CELLS), choices=list(CELLS), help="what to measure")
    option("--precision", default="bf16", choices=["fp32", "bf16"], help="dtype of computation")
    option("--rounds", type=int, default=4, help="turns of each engine")
    option("--turn", type=int, default=3, help="steps of a turn")
    option("--warm-up", type=int, default=2, help="steps before the first turn")
    option("--threads", type=int, default=2, help="CPU threads")
    option("--write", type=Path, default=results, help="write PATH.md (default: results/DATE-finetune)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
