"""The one place that says how far a prediction may be off: a lognormal interval whose width follows from its parts.

The widths were fitted to the residuals of published runs, each source's by the constants of all others.
"""

from dataclasses import dataclass
from math import exp, sqrt

from meshwright.plan.job import Job
from meshwright.plan.memory import MemoryUse
from meshwright.plan.step_time import StepTime
from meshwright.spec.cluster import ClusterSpec

NOMINAL = 0.8
"""Share of measurements that lie inside."""
Z = 1.2816
"""Normal quantile of (1 + NOMINAL) / 2."""


@dataclass(frozen=True)
class Interval:
    """A prediction and the range that holds `NOMINAL` of measurements."""

    value: float
    low: float
    high: float

    @classmethod
    def spread(cls, value: float, sigma: float) -> "Interval":
        """Around `value` with standard deviation `sigma` of its logarithm."""
        return cls(value, value * exp(-Z * sigma), value * exp(Z * sigma))

    def scaled(self, factor: float) -> "Interval":
        """The same in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def time_sigma(time: StepTime, job: Job, cluster: ClusterSpec, completed: int = 0) -> float:
    """Spread of the step time: wider where communication, waiting, experts or an unmeasured device decide."""
    total = time.total
    parts = [
        0.102,
        0.36 * time.exposed / total,
        0.36 * time.bubble / total,
        0.54 * (time.host + time.update) / total,
        0.18 if job.model.top_k else 0.0,
        0.024 * completed,
    ]
    if not cluster.measured.matmul_tflops and not cluster.achievable_tflops:
        parts.append(0.45)  # nobody has measured what this device reaches
    if cluster.measured.matmul_tflops:
        parts[0] = 0.06
    return sqrt(sum(part * part for part in parts))


def memory_sigma(use: MemoryUse, job: Job, completed: int = 0) -> float:
    """Spread of a rank's peak memory: states are exact, activations nearly, what the allocator wastes is not."""
    total = use.total
    parts = [
        0.046,
        0.12 * (use.activations + use.communication) / total,
        0.3 * use.logits / total,
        0.55 * (use.fragmentation + use.context) / total,
        0.18 if job.model.top_k else 0.0,
        0.034 * completed,
    ]
    return sqrt(sum(part * part for part in parts))
