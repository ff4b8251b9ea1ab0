"""The one place that says how far two correct computations of the same step may differ; docs/verify.md derives it."""

from dataclasses import dataclass
from math import sqrt

from meshwright.spec.run import ResolvedRun

EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Distance from 1 to the next number."""

STORED_PER_BLOCK = 12
"""Results that a block writes down in the compute dtype, one after the other: two norms, projection, rotation,
attention, projection, sum; two products, activation, product, sum."""

CONFIDENCE = 4.0
"""Standard deviations: how far independent roundings may add up."""

SMOOTHING = 0.1
"""AdamW's epsilon in a proof. With the usual 1e-8 a first step is nearly the gradient's sign, which turns rounding
into whole steps; with this the step is a smooth function of the gradient, of slope at most lr / epsilon."""

MUON_SLOPE = 3.4445**5
"""Five Newton-Schulz iterations enlarge a difference by at most their largest coefficient each."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed differences. `relative` to the largest value of its kind."""

    relative: float
    rounding: float
    """Of a stored weight, relative to the largest weight of its tensor."""
    slope: float
    """Of AdamW's step with respect to the gradient."""
    muon_slope: float
    """Of Muon's step, times the norm of the matrix's gradient; 0 without Muon."""

    def of_update(self, gradient: float, weight: float, smallest_norm: float) -> float:
        """For a weight after the step, where gradients may differ by `gradient` and weights are at most `weight`."""
        slope = max(self.slope, self.muon_slope / smallest_norm if smallest_norm else 0.0)
        return slope * gradient + self.rounding * weight


def derive_tolerance(resolved: ResolvedRun) -> Tolerance:
    """What the order of summation may change, from dtypes and the lengths of sums."""
    training, model = resolved.run.training, resolved.model
    sums = model.hidden + model.num_heads * model.head_dim + model.ffn + resolved.run.data.sequence_length
    terms = resolved.tokens_per_step + 2 * (model.num_layers * sums + model.vocab + model.hidden)
    low = training.precision in ("bf16", "fp16")
    wide = EPSILON["fp32" if low else training.precision]
    relative = terms * wide
    if low:
        stored = 2 * (STORED_PER_BLOCK * model.num_layers + 4)
        relative += CONFIDENCE * sqrt(stored) * EPSILON[training.precision]
        relative += EPSILON[training.reduce_dtype] * sqrt(resolved.global_batch) * CONFIDENCE
    optimizer = training.optimizer
    return Tolerance(
        relative=relative,
        rounding=4 * wide,
        slope=optimizer.lr / optimizer.eps,
        muon_slope=optimizer.muon_lr * MUON_SLOPE if optimizer.name == "muon" else 0.0,
    )
