"""A server's metrics, in Prometheus's text format."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bucket boundaries of the histograms."""


class Metrics:
    """Counters and histograms by name and labels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self._times: dict[str, list[float]] = {}
        self._help: dict[str, str] = {}

    def count(self, name: str, amount: float = 1, *, about: str, **labels: str) -> None:
        """Add to a counter; `about` is its description."""
        with self._lock:
            self._help[name] = about
            self._counts[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, seconds: float, *, about: str) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._help[name] = about
            histogram = self._times.setdefault(name, [0.0] * (len(SECONDS) + 2))
            for place, border in enumerate(SECONDS):
                histogram[place] += seconds <= border
            histogram[-2] += 1
            histogram[-1] += seconds

    def text(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
        """Everything, and `gauges`: name -> (description, model -> value)."""
        lines: list[str] = []
        with self._lock:
            counts, times, descriptions = dict(self._counts), dict(self._times), dict(self._help)
        for name in sorted({name for name, _ in counts}):
            lines += _head(name, "counter", descriptions[name])
            lines += (
                f"{name}{_labels(labels)} {value:g}" for (other, labels), value in counts.items() if other == name
            )
        for name, histogram in sorted(times.items()):
            lines += _head(name, "histogram", descriptions[name])
            borders = [*(f"{border:g}" for border in SECONDS), "+Inf"]
            lines += (
                f'{name}_bucket{{le="{border}"}} {value:g}' for border, value in zip(borders, histogram, strict=False)
            )
            lines += [f"{name}_sum {histogram[-1]:g}", f"{name}_count {histogram[-2]:g}"]
        for name, (about, values) in gauges.items():
            lines += _head(name, "gauge", about)
            lines += (f"{name}{_labels([('model', model)])} {value:g}" for model, value in values.items())
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{inner}}}" if inner else ""
