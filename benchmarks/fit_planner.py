"""Fits the planner's global constants to published runs, and reports each source's error when it is left out.

    python benchmarks/fit_planner.py                 fit to everything and print the constants
    python benchmarks/fit_planner.py --left-out      fit without each family of sources in turn, and judge that family

The most likely constants, given all runs and a prior of each constant with its width (from datasheets and kernels' own
benchmarks): Gauss-Newton steps on the logarithms of ratios, with less weight on outliers (Huber, 1964). A source's
weight is the square root of its rows, because their errors are alike; constants that the table does not determine stay
at their priors.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from math import exp, log, sqrt
from pathlib import Path

import numpy as np

from meshwright.predict.constants import Constants
from meshwright.predict.step_time import predict_step_time
from meshwright.validate.judge import judge
from meshwright.validate.rows import PublishedRun
from meshwright.validate.table import read_table

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
"""Sources that share authors or program, by the prefix of their rows' ids; they are left out together."""

NOISY = {"v1": 0.25, "gv": 0.05, "ns": 0.3, "nl": 0.3}
"""Weights of sources whose own authors call them noisy, of toy models, and of near duplicates."""

WIDTHS = {
    "matmul": 0.05,
    "memory": 0.06,
    "attention_backward": 0.05,
    "link": 0.1,
    "network": 0.12,
    "flash": 0.12,
    "flash_hopper": 0.12,
    "hopper": 0.12,
    "imbalance": 0.05,
    "expert_matmul": 0.1,
    "all_to_all": 0.1,
    "optimizer_bytes": 0.15,
    "overlap": 0.12,
    "relay": 0.15,
    "score_bytes": 0.2,
    "logit_bytes": 0.2,
}
"""Standard deviations of the logarithms of priors that are supported by benchmarks."""
WIDE = 0.35
"""The standard deviation of all other priors."""

NOISE = 0.08
"""Standard deviation of a run's logarithm that no constant explains."""
FAR = 1.5
"""Residuals, in units of `NOISE`, beyond which a run counts less."""

NAMES = [field.name for field in fields(Constants)]


def source(run: PublishedRun) -> str:
    """The prefix of a row's id."""
    return run.id.split("-")[0]


def weights(runs: Sequence[PublishedRun]) -> np.ndarray:
    """The weight of every run."""
    rows = Counter(source(run) for run in runs)
    return np.array([NOISY.get(source(run), 1.0) * 2 / sqrt(rows[source(run)]) for run in runs])


def residuals(constants: Constants, runs: Sequence[PublishedRun]) -> np.ndarray:
    """log(predicted / measured) of every run."""
    return np.array(
        [log(predict_step_time(run.job, run.cluster, constants).total / (run.seconds or 1)) for run in runs]
    )


def slopes(constants: Constants, runs: Sequence[PublishedRun], at: np.ndarray) -> np.ndarray:
    """Derivatives of the residuals with respect to the logarithms of the constants, [runs, constants]."""
    moved = [replace(constants, **{name: getattr(constants, name) * exp(0.05)}) for name in NAMES]
    return np.stack([(residuals(other, runs) - at) / 0.05 for other in moved], axis=1)


def fit(runs: Sequence[PublishedRun], rounds: int = 4) -> Constants:
    """The most likely constants."""
    guess = Constants()
    widths = np.array([WIDTHS.get(name, WIDE) for name in NAMES])
    weight, moved = weights(runs), np.zeros(len(NAMES))
    for _ in range(rounds):
        constants = shifted(guess, moved)
        off = residuals(constants, runs)
        slope = slopes(constants, runs, off)
        trust = weight / NOISE**2 * np.minimum(1, FAR * NOISE / np.maximum(abs(off), 1e-9))
        normal = slope.T @ (trust[:, None] * slope) + np.diag(widths**-2.0)
        step = np.linalg.solve(normal, -slope.T @ (trust * off) - moved / widths**2)
        moved += np.clip(step, -0.3, 0.3)
    return shifted(guess, moved)


def shifted(guess: Constants, moved: np.ndarray) -> Constants:
    """The constants whose logarithms are the prior's plus `moved`."""
    return replace(guess, **{name: getattr(guess, name) * exp(by) for name, by in zip(NAMES, moved, strict=True)})


def left_out(runs: Sequence[PublishedRun], family: str, rounds: int) -> dict[str, float]:
    """Rows, errors and share inside the interval of a family, with constants fitted to all others."""
    prefixes = FAMILIES[family]
    judged = judge(
        [run for run in runs if source(run) in prefixes],
        fit([run for run in runs if source(run) not in prefixes], rounds),
    )
    measured = [(row.seconds, row.run.seconds) for row in judged if row.run.seconds]
    errors = [abs(predicted.value / seconds - 1) for predicted, seconds in measured]
    return {
        "rows": len(errors),
        "median_ape": statistics.median(errors),
        "mape": statistics.mean(errors),
        "bias": statistics.median(log(predicted.value / seconds) for predicted, seconds in measured),
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
    parser.add_argument("--rounds", type=int, default=4, help="Gauss-Newton steps (default 4)")
    arguments = parser.parse_args()
    runs = [run for run in read_table(TABLE).runs if run.seconds]
    if arguments.left_out:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        for family in FAMILIES if arguments.left_out == "all" else (arguments.left_out,):
            found[family] = left_out(runs, family, arguments.rounds)
            print(family, found[family], flush=True)
            RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return
    for name, value in asdict(fit(runs, arguments.rounds)).items():
        print(f"    {name}={value:.3g},")


if __name__ == "__main__":
    main()
