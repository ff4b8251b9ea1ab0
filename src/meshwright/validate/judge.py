"""The planner's errors on a table of published runs, source by source."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from meshwright.predict.candidate import complexity
from meshwright.predict.constants import FITTED, Constants
from meshwright.predict.interval import NOMINAL, PredictionInterval, memory_sigma, time_sigma
from meshwright.predict.memory import predict_memory
from meshwright.predict.search import ALIKE
from meshwright.predict.step_time import predict_step_time
from meshwright.validate.rows import PublishedRun

SWEEP = 3
"""Minimum number of layouts of one job for a rank correlation, and of rows of a source for a factor."""

CHOICES = ("layout", "micro_batch", "sequence_parallel", "recompute", "recompute_share", "offload_activations")
"""The keys of a job's layout; rows that agree in all of them are one layout, measured repeatedly."""


@dataclass(frozen=True)
class Judged:
    """One row's predictions and measurements: seconds per step and GB per device."""

    run: PublishedRun
    seconds: PredictionInterval
    memory_gb: PredictionInterval
    fits: bool
    """Whether the planner predicts that the run fits."""

    def pairs(self, quantity: str) -> tuple[PredictionInterval, float | None]:
        """(prediction, measurement) of `step_time` or `memory`."""
        if quantity == "step_time":
            return self.seconds, self.run.seconds
        return self.memory_gb, self.run.memory_gb


def judge(runs: Iterable[PublishedRun], constants: Constants = FITTED) -> list[Judged]:
    """Predict every run."""
    judged = []
    for run in runs:
        time = predict_step_time(run.job, run.cluster, constants)
        use = predict_memory(run.job)
        counted = {"states": use.states, "allocated": use.allocated, "device": use.total}[run.memory_kind]
        completed = len(run.completed)
        judged.append(
            Judged(
                run,
                PredictionInterval.spread(time.total, time_sigma(time, run.job, run.cluster, completed)),
                PredictionInterval.spread(counted / 1e9, memory_sigma(use, run.job, completed)),
                use.least <= run.cluster.memory_gb * 1e9,
            )
        )
    return judged


def report(judged: Sequence[Judged], refused: dict[str, str]) -> dict[str, Any]:
    """Everything `plan validate --json` prints: errors as fractions, times in seconds, memory in GB."""
    by_source: dict[str, list[Judged]] = defaultdict(list)
    for row in judged:
        by_source[source_name(row.run.source)].append(row)
    baseline = constant_mfu(judged)
    summary: dict[str, Any] = {
        "nominal_coverage": NOMINAL,
        "rows": len(judged) + len(refused),
        "refused": len(refused),
        "completed": sum(bool(row.run.completed) for row in judged),
        **_quantities(judged, baseline),
        "per_source": {name: {"rows": len(rows), **_quantities(rows, baseline)} for name, rows in by_source.items()},
        "completed_inputs": _count(name for row in judged for name in row.run.completed),
        "unknown_devices": _count(
            f"{row.run.unknown_device} as {row.run.cluster.device}" for row in judged if row.run.unknown_device
        ),
    }
    rows = [_row(row) for row in judged]
    rows += [{"id": id, "refused": reason} for id, reason in refused.items()]
    return {"summary": summary, "rows": rows}


def source_name(source: str) -> str:
    """A source without the row or test case that a line of it came from."""
    name = re.split(r" row \d+", source)[0]
    return re.sub(r"(test_cases/\w+)/.*", r"\1", name)


def _quantities(rows: Sequence[Judged], baseline: dict[str, float]) -> dict[str, Any]:
    """Errors of both quantities over some rows."""
    return {
        "step_time": _summary(rows, "step_time", baseline),
        "memory": _summary(rows, "memory", baseline) | out_of_memory(rows),
    }


def _summary(rows: Sequence[Judged], quantity: str, baseline: dict[str, float]) -> dict[str, Any]:
    """Errors of one quantity over some rows."""
    measured = [(row, *row.pairs(quantity)) for row in rows]
    known = [(row, predicted, value) for row, predicted, value in measured if value]
    if not known:
        return {"rows": 0}
    errors = [abs(predicted.value / value - 1) for _, predicted, value in known]
    inside = [predicted.low <= value <= predicted.high for _, predicted, value in known]
    summary: dict[str, Any] = {
        "rows": len(known),
        "median_ape": statistics.median(errors),
        "mape": statistics.mean(errors),
        "coverage": statistics.mean(inside),
        "spearman": sweep_correlation(rows, quantity),
        "calibrated_median_ape": calibrated_error(rows, quantity),
    }
    if quantity == "step_time":
        constant = [abs(baseline[row.run.id] / value - 1) for row, _, value in known if row.run.id in baseline]
        summary["baseline_mape"] = statistics.mean(constant) if constant else None
        summary["skill"] = 1 - summary["mape"] / summary["baseline_mape"] if constant else None
    return summary


def constant_mfu(judged: Sequence[Judged]) -> dict[str, float]:
    """id -> seconds by the baseline rule: one model FLOPs utilisation, the median of all other sources."""
    shares: dict[str, list[float]] = defaultdict(list)
    ideal = {}
    for row in judged:
        run = row.run
        if not run.seconds:
            continue
        peak = run.cluster.peak(run.job.precision)
        tokens = run.job.global_batch * run.job.sequence
        seconds = tokens * run.job.model.model_flops(run.job.sequence) / (peak * 1e12 * run.cluster.devices)
        ideal[run.id] = seconds
        shares[source_name(run.source)].append(seconds / run.seconds)
    seconds_of = {}
    for row in judged:
        others = [share for name, rows in shares.items() if name != source_name(row.run.source) for share in rows]
        if row.run.id in ideal and others:
            seconds_of[row.run.id] = ideal[row.run.id] / statistics.median(others)
    return seconds_of


@dataclass(frozen=True)
class Tried:
    """One layout of a sweep: the medians of prediction and measurement, if it was measured several times."""

    id: str
    """Id of its first row."""
    predicted: float
    measured: float
    fits: bool
    complexity: int


def sweeps(rows: Iterable[Judged], quantity: str, least: int) -> list[tuple[Judged, list[Tried]]]:
    """Jobs that were measured in `least` or more layouts, each with its first row: one source, model, sequence, batch,
    device and number of devices."""
    groups: dict[tuple, dict[tuple, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.pairs(quantity)[1]:
            job, model = row.run.job, row.run.job.model
            batch = job.global_batch if quantity == "step_time" else 0
            where = row.run.cluster.device, row.run.cluster.devices
            size = model.num_parameters, model.active_parameters, job.sequence, *where, batch
            layout = tuple(getattr(job, field) for field in CHOICES)
            groups[(source_name(row.run.source), *size)][layout].append(row)
    return [
        (next(iter(layouts.values()))[0], [_tried(repeats, quantity) for repeats in layouts.values()])
        for layouts in groups.values()
        if len(layouts) >= least
    ]


def _tried(repeats: Sequence[Judged], quantity: str) -> Tried:
    return Tried(
        id=repeats[0].run.id,
        predicted=statistics.median(row.pairs(quantity)[0].value for row in repeats),
        measured=statistics.median(_measured(row, quantity) for row in repeats),
        fits=any(row.fits for row in repeats),
        complexity=complexity(repeats[0].run.job.layout),
    )


def sweep_correlation(rows: Iterable[Judged], quantity: str) -> float | None:
    """Spearman's rank correlation of the layouts of a sweep, averaged with their number as weight."""
    weighted = [
        (len(tried), spearman([one.predicted for one in tried], [one.measured for one in tried]))
        for _, tried in sweeps(rows, quantity, SWEEP)
    ]
    known = [(weight, value) for weight, value in weighted if value is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; None if one side is constant."""
    a, b = _ranks(left), _ranks(right)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(a, b)


def calibrated_error(rows: Sequence[Judged], quantity: str) -> float | None:
    """Median error when one factor per source corrects every row, fitted on the other rows of that source."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        predicted, value = row.pairs(quantity)
        if value:
            groups[source_name(row.run.source)].append((predicted.value, value))
    errors = []
    for pairs in groups.values():
        if len(pairs) < SWEEP:
            continue
        for left_out, (predicted, value) in enumerate(pairs):
            factor = statistics.median(log(v / p) for i, (p, v) in enumerate(pairs) if i != left_out)
            errors.append(abs(predicted * exp(factor) / value - 1))
    return statistics.median(errors) if errors else None


def out_of_memory(rows: Iterable[Judged]) -> dict[str, Any]:
    """The accuracy of 'does not fit': rows that ran, rows that ran out of memory, and the predictions for both."""
    ran_out = [row for row in rows if row.run.out_of_memory]
    ran = [row for row in rows if not row.run.out_of_memory and row.run.memory_kind != "states"]
    predicted = [row for row in ran_out + ran if not row.fits]
    hits = sum(not row.fits for row in ran_out)
    return {
        "oom_rows": len(ran_out),
        "oom_predicted": len(predicted),
        "oom_precision": hits / len(predicted) if predicted else None,
        "oom_recall": hits / len(ran_out) if ran_out else None,
    }


def regret(rows: Iterable[Judged]) -> list[dict[str, Any]]:
    """For every sweep, how much slower the planner's choice is than the fastest measured layout. The choice is the
    simplest of those that fit and are predicted to be about as fast as the best of them."""
    results = []
    for first, tried in sweeps(rows, "step_time", 2):
        fitting = [one for one in tried if one.fits] or tried
        limit = (1 + ALIKE) * min(one.predicted for one in fitting)
        alike = (one for one in fitting if one.predicted <= limit)
        chosen = min(alike, key=lambda one: (one.complexity, one.predicted))
        results.append(
            {
                "source": source_name(first.run.source),
                "layouts": len(tried),
                "devices": first.run.cluster.devices,
                "parameters": first.run.job.model.num_parameters,
                "chosen": chosen.id,
                "regret": chosen.measured / min(one.measured for one in tried) - 1,
            }
        )
    return results


def worst(judged: Sequence[Judged], quantity: str) -> list[Judged]:
    """The ten rows with the largest errors, by the logarithm of their ratio."""

    def distance(row: Judged) -> float:
        predicted, value = row.pairs(quantity)
        return abs(log(predicted.value / value)) if value else 0.0

    return sorted(judged, key=distance, reverse=True)[:10]


def _measured(row: Judged, quantity: str) -> float:
    value = row.pairs(quantity)[1]
    assert value is not None
    return value


def _row(row: Judged) -> dict[str, Any]:
    def both(quantity: str) -> dict[str, Any]:
        predicted, value = row.pairs(quantity)
        return {"predicted": predicted.value, "low": predicted.low, "high": predicted.high, "measured": value}

    return {
        "id": row.run.id,
        "source": row.run.source,
        "step_time": both("step_time"),
        "memory": both("memory") | {"kind": row.run.memory_kind, "fits": row.fits, "oom": row.run.out_of_memory},
        "completed": list(row.run.completed),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(order):
        places[value].append(place)
    return [statistics.mean(places[value]) for value in values]


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
