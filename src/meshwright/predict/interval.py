"""Prediction intervals: lognormal, with a width derived from the prediction's parts.

The widths were fitted to the residuals of published runs, each source predicted with the constants of all others.
"""

import re
from dataclasses import dataclass
from math import exp, sqrt

from meshwright.predict.job import Job
from meshwright.predict.memory import MemoryUse
from meshwright.predict.step_time import StepTime
from meshwright.spec.cluster import ClusterSpec

NOMINAL = 0.8
"""Share of measurements inside the interval."""
Z = 1.2816
"""Normal quantile of (1 + NOMINAL) / 2."""


@dataclass(frozen=True)
class PredictionInterval:
    """A prediction and the range that holds `NOMINAL` of measurements."""

    value: float
    low: float
    high: float

    @classmethod
    def spread(cls, value: float, sigma: float) -> "PredictionInterval":
        """Around `value` with standard deviation `sigma` of its logarithm."""
        return cls(value, value * exp(-Z * sigma), value * exp(Z * sigma))

    def scaled(self, factor: float) -> "PredictionInterval":
        """The interval in another unit."""
        return PredictionInterval(self.value * factor, self.low * factor, self.high * factor)


GENERATIONS = {
    **dict.fromkeys(("A100", "A800", "H100", "H800", "H200", "GH200"), 0.0),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300"), 0.1),
    "V100": 0.3,
}
"""Spread of a device generation beyond generations with many published runs: V100s vary by 40 % from one allocation to
the next, and for Blackwells the table has runs of one model."""
RARE, UNMEASURED = 0.2, 0.35
"""The spread of other devices, and the addition where their achieved rate has not been measured."""

EMULATED = 0.5
"""The spread of emulated products, which have not been measured on any GPU."""


def time_sigma(time: StepTime, job: Job, cluster: ClusterSpec, completed: int = 0) -> float:
    """Spread of the step time: wider where communication, waiting, experts, the host's memory, adapters, four bits,
    emulation, or a program or device that few have measured decide."""
    total = time.total
    parts = [
        0.06 if cluster.measured.matmul_tflops else 0.105,
        0.36 * time.exposed / total,
        0.36 * time.bubble / total,
        0.54 * (time.host + time.update) / total,
        0.3 if job.layout.offload != "none" else 0.0,
        0.18 if job.model.top_k else 0.0,
        0.15 if job.frozen else 0.0,
        0.25 if job.precision.products == "fp4" else 0.0,
        EMULATED if job.stack.emulated else 0.0,
        0.024 * completed,
        job.stack.spread,
        _device_spread(cluster),
    ]
    return sqrt(sum(part * part for part in parts))


def _device_spread(cluster: ClusterSpec) -> float:
    if cluster.measured.matmul_tflops:
        return 0.0
    spread = GENERATIONS.get(re.split(r"[- ]", cluster.device)[0], RARE)
    return spread if cluster.achievable_tflops else sqrt(spread**2 + UNMEASURED**2)


def memory_sigma(use: MemoryUse, job: Job, completed: int = 0) -> float:
    """Spread of a rank's peak memory: states are exact, activations nearly so, fragmentation is not."""
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
