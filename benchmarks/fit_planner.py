"""Fits the planner's global constants to published runs, and says how far off each source is when it is left out.

    python benchmarks/fit_planner.py                 fit to everything and print the constants
    python benchmarks/fit_planner.py --left-out      fit without each family of sources in turn, and judge that family

A coordinate search in logarithms from the values that stand in `plan/constants.py`. Sources weigh alike whatever their
number of rows; moving a constant by 30 % costs as much as 0.15 % of error: what the table does not decide stays put.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from math import exp, log
from pathlib import Path

from meshwright.plan.constants import FITTED, Constants
from meshwright.plan.published import PublishedRun, read_published
from meshwright.plan.step_time import predict_step_time
from meshwright.plan.validate import judge

HERE = Path(__file__).resolve().parent
TABLE = HERE / "published_runs.csv"
RESULTS = HERE / "results" / "plan-left-out.json"

FAMILIES = {
    "MosaicML": ("lf",),
    "NVIDIA NeMo, Megatron Bridge": ("mb", "nm", "nl", "ns"),
    "torchtitan, fms-fsdp": ("tt", "fm"),
    "Megatron 2021 and 2022": ("mg", "kt"),
    "vTrain": ("vm", "vs"),
    "BigScience V100": ("v1",),
    "Megatron tests": ("gv",),
}
"""Sources that share authors or program, by the beginning of their rows' ids: left out together."""

NOISY = {"v1": 0.5, "gv": 0.15, "ns": 0.3, "nl": 0.3}
"""Weights of sources whose own authors call them noisy, of toy models, and of near duplicates."""

BOUNDS = {
    "matmul": (0.6, 1.05),
    "small_fp8": (0.5, 1.05),
    "memory": (0.5, 0.95),
    "link": (0.4, 0.92),
    "network": (0.4, 1.0),
    "overlap": (0.3, 1.0),
    "imbalance": (1.0, 1.2),
    "all_to_all": (0.3, 0.9),
    "fused_elementwise": (0.2, 1.2),
}
"""What is physically possible, where it is known."""


def source(run: PublishedRun) -> str:
    """The beginning of a row's id."""
    return run.id.split("-")[0]


def objective(constants: Constants, runs: Sequence[PublishedRun], start: Constants) -> float:
    """Mean over sources of the mean absolute log ratio, outliers capped, plus the price of moving."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        assert run.seconds is not None
        error = abs(log(predict_step_time(run.job, run.cluster, constants).total / run.seconds))
        error = min(error, 0.6)
        errors[source(run)].append(error if error > 0.05 else error**2 / 0.1 + 0.025)
    weights = {name: NOISY.get(name, 1.0) for name in errors}
    mean = sum(weights[name] * statistics.mean(found) for name, found in errors.items()) / sum(weights.values())
    moved = sum(
        (log(getattr(constants, field.name) / getattr(start, field.name)) / 0.3) ** 2 for field in fields(constants)
    )
    return mean + 0.0015 * moved


def fit(runs: Sequence[PublishedRun], start: Constants = FITTED, rounds: int = 3) -> Constants:
    """The constants that a coordinate search finds, smaller steps every round."""
    rng, best, names = random.Random(0), start, [field.name for field in fields(start)]
    score, step = objective(best, runs, start), 0.2
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            for sign in (1, -1):
                improved = True
                while improved:
                    value = getattr(best, name) * exp(sign * step)
                    low, high = BOUNDS.get(name, (0.0, float("inf")))
                    tried = replace(best, **{name: value})
                    improved = low <= value <= high and objective(tried, runs, start) < score - 1e-5
                    if improved:
                        best, score = tried, objective(tried, runs, start)
        step *= 0.6
    return best


def left_out(runs: Sequence[PublishedRun], family: str, rounds: int) -> dict[str, float]:
    """Rows, errors and share inside the interval of a family, by constants fitted to all others from first guesses."""
    prefixes = FAMILIES[family]
    outside = [run for run in runs if source(run) not in prefixes]
    judged = judge([run for run in runs if source(run) in prefixes], fit(outside, start=Constants(), rounds=rounds))
    measured = [(row.seconds, row.run.seconds) for row in judged if row.run.seconds]
    errors = [abs(predicted.value / seconds - 1) for predicted, seconds in measured]
    return {
        "rows": len(errors),
        "median_ape": statistics.median(errors),
        "mape": statistics.mean(errors),
        "coverage": statistics.mean(predicted.low <= seconds <= predicted.high for predicted, seconds in measured),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--left-out",
        nargs="?",
        const="all",
        metavar="FAMILY",
        help="judge every family (or one, by its name) by constants fitted without it",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the coordinate search (default 3)")
    arguments = parser.parse_args()
    runs = [run for run in read_published(TABLE)[0] if run.seconds]
    if arguments.left_out:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        for family in FAMILIES if arguments.left_out == "all" else (arguments.left_out,):
            found[family] = left_out(runs, family, arguments.rounds)
            print(family, found[family], flush=True)
            RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return
    for name, value in asdict(fit(runs, rounds=arguments.rounds)).items():
        print(f"    {name}: float = {value:.3g}")


if __name__ == "__main__":
    main()
