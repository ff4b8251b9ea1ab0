"""The results of tasks. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A mean over questions."""

    value: float
    stderr: float | None = None
    """Standard error; None if it is not known."""


@dataclass(frozen=True)
class TaskResult:
    """A model's results in one task."""

    name: str
    num_questions: int
    metrics: dict[str, Metric]
    records: Sequence[dict[str, Any]] = field(default=(), repr=False)
    """Each question with the model's answer and its scores."""

    def figures(self) -> dict[str, Any]:
        """The result as data."""
        metrics = {name: {"value": one.value, "stderr": one.stderr} for name, one in self.metrics.items()}
        return {"questions": self.num_questions, "metrics": metrics}

    def line(self) -> str:
        """`capitals  acc 0.750 ± 0.043  (100 questions)`."""
        figures = (
            f"{name} {one.value:.4g}" + ("" if one.stderr is None else f" ± {one.stderr:.2g}")
            for name, one in self.metrics.items()
        )
        return f"{self.name}  {'  '.join(figures)}  ({self.num_questions} questions)"


def flat_figures(results: Sequence[TaskResult]) -> dict[str, float]:
    """`TASK/METRIC` and `TASK/METRIC_stderr` of all results."""
    figures = {}
    for result in results:
        for name, metric in result.metrics.items():
            figures[f"{result.name}/{name}"] = metric.value
            if metric.stderr is not None:
                figures[f"{result.name}/{name}_stderr"] = metric.stderr
    return figures
