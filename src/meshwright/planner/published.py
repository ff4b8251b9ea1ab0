"""The error of plans like a given one: published runs on such devices, of such a size, and how far off they were
predicted."""

import csv
import functools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from meshwright.predict.candidate import Candidate

ENOUGH = 12
"""Published step times from which a comparison says something; with fewer, it is made with more kinds of run."""
NEAR = 4.0
"""Factor within which sizes and numbers of devices are alike."""


@dataclass(frozen=True)
class Measurement:
    """A published run's predicted and measured figure."""

    quantity: str
    """step_time or memory."""
    id: str
    device: str
    devices: int
    billions: float
    """Parameters of the model."""
    experts: bool
    fitted: bool
    """Whether the planner's constants were fitted to it."""
    ratio: float
    """Predicted, relative to measured."""
    inside: bool
    """Whether the measurement is in the predicted range."""

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return abs(self.ratio - 1)


@dataclass(frozen=True)
class PublishedError:
    """The measurements that are like a plan."""

    like: str
    """What they have in common with it."""
    times: tuple[Measurement, ...]
    memory: tuple[Measurement, ...]


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """The packaged table, which `docs/make_published_errors_csv.py` writes."""
    text = resources.files("meshwright.planner").joinpath("data/published_errors.csv").read_text(encoding="utf-8")
    return tuple(_measurement(row) for row in csv.DictReader(text.splitlines()))


def _measurement(row: dict[str, str]) -> Measurement:
    return Measurement(
        row["quantity"],
        row["id"],
        row["device"],
        int(row["devices"]),
        float(row["billions"]),
        experts=row["experts"] == "1",
        fitted=row["fitted"] == "1",
        ratio=float(row["ratio"]),
        inside=row["inside"] == "1",
    )


def published_error(candidate: Candidate) -> PublishedError:
    """The published runs that are most like a layout, as many kinds of likeness as leave enough of them."""
    model, cluster = candidate.job.model, candidate.cluster
    device, size = re.split(r"[- ]", cluster.device)[0], model.num_parameters / 1e9
    experts = model.top_k > 0
    kinds: list[tuple[str, Callable[[Measurement], bool]]] = [
        ("mixtures of experts" if experts else "dense models", lambda one: one.experts == experts),
        (f"on {device}", lambda one: one.device == device),
        (f"of {_short(size / NEAR)}B to {_short(size * NEAR)}B parameters", lambda one: _near(one.billions, size)),
        (
            f"on {max(1, round(cluster.devices / NEAR)):,} to {round(cluster.devices * NEAR):,} devices",
            lambda one: _near(one.devices, cluster.devices),
        ),
    ]
    times = [one for one in measurements() if one.quantity == "step_time"]
    memory = [one for one in measurements() if one.quantity == "memory"]
    words = []
    for name, alike in kinds:
        closer = [one for one in times if alike(one)]
        if len(closer) >= ENOUGH:
            times, memory = closer, [one for one in memory if alike(one)]
            words.append(name)
    return PublishedError(", ".join(words) or "of every kind", tuple(times), tuple(memory))


def summary(measurements: Sequence[Measurement]) -> str:
    """The median error, and the share inside the predicted range."""
    if not measurements:
        return "none"
    middle = statistics.median(one.error for one in measurements)
    inside = sum(one.inside for one in measurements) / len(measurements)
    return f"{len(measurements)}: median error {middle:.1%}, {inside:.0%} inside their ranges"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _near(one: float, other: float) -> bool:
    return other / NEAR <= one <= other * NEAR
