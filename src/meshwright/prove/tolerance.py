"""Tolerances: how far two correct computations of the same step may differ; docs/verify.md derives them."""

from dataclasses import dataclass
from math import sqrt
from typing import TypedDict

from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun

STORED_PER_BLOCK = 12
"""Results that a block stores in the compute dtype in sequence: two norms, projection, rotation, attention, projection,
sum; two products, activation, product, sum."""

CONFIDENCE = 4.0
"""Standard deviations: the allowed sum of independent roundings."""

SMOOTHING = 0.1
"""AdamW's epsilon in a proof. With the usual 1e-8 a first step is nearly the gradient's sign, which turns rounding into
whole steps. With this value the step is a smooth function of the gradient with slope at most lr / epsilon."""

CLIP = 0.01
"""The norm to which a proof clips if the recipe clips: below any gradient's norm, so that a wrong norm shows."""

MUON_SLOPE = 3.4445**5
"""Each of five Newton-Schulz iterations enlarges a difference by at most its largest coefficient."""


class Facts(TypedDict):
    """A step's figures, computed by the reference."""

    loss: float
    gnorm: float
    largest: float
    """The largest entry of all gradients, as scaled."""
    smallest_norm: float
    """The smallest norm of a matrix's gradient; 0 without matrices."""
    factor: float
    """The factor of gradients from clipping and the loss scale: the largest so far."""
    expert_load: float | None


@dataclass(frozen=True)
class Tolerance:
    """Allowed differences. `relative`: to the largest value of the same kind."""

    relative: float
    rounding: float
    """Rounding of a stored weight, relative to the largest weight of its tensor."""
    slope: float
    """Slope of AdamW's step with respect to the gradient."""
    muon_slope: float
    """Slope of Muon's step, times the norm of the matrix's gradient; 0 without Muon."""
    beta2: float = 0.95
    """AdamW's."""
    statistical: bool = False
    """Whether the allowance of gradients and updates is the measured effect of rounding (`rounding.py`), not
    `relative`."""
    moment_rounding: float = 0.0
    """Rounding of the optimizer's state and of values computed from it, relative to its tensor's largest number."""

    def of_update(self, facts: Facts, weight: float, more: float = 0.0) -> float:
        """The tolerance of a weight after a step with these figures, for weights of at most `weight`; `more`: further
        tolerance of its gradient (`gathered.Room.after_clipping`)."""
        smallest = facts["smallest_norm"] * facts["factor"]
        slope = max(self.slope, self.muon_slope / smallest if smallest else 0.0)
        rounding = self.slope * self.moment_rounding * facts["largest"] * facts["factor"]
        return slope * self.of_gradient(facts, more) + rounding + self.rounding * weight

    def of_gradient(self, facts: Facts, more: float = 0.0) -> float:
        """The allowance of a gradient that the optimizer receives. Clipping adds the norm's error, which is as large as
        the gradient's own."""
        return (2 * self.relative * facts["largest"] + more) * facts["factor"]

    def of_moment(self, key: str, facts: Facts, step: int, largest: float, more: float = 0.0) -> float:
        """The allowance of an optimizer state tensor after a step, whose numbers are at most `largest`: a mean of the
        gradients so far or of their squares; counts of steps are exact."""
        if key == "step":
            return 0.0
        room = self.of_gradient(facts, more)
        if key == "exp_avg_sq":
            gradient = facts["largest"] * facts["factor"]
            room = (1 - self.beta2**step) * (2 * gradient * room + room * room)
        return room + self.moment_rounding * largest


def derive_tolerance(resolved: ResolvedRun) -> Tolerance:
    """The allowed effect of summation order, from dtypes and the lengths of sums."""
    training, model = resolved.run.training, resolved.model
    sums = model.hidden + model.num_heads * model.head_dim + model.ffn + resolved.run.data.sequence_length
    terms = resolved.tokens_per_step + 2 * (model.num_layers * sums + model.vocab + model.hidden)
    dtypes = training.dtypes
    wide = dtypes.master.epsilon
    split = model.foreign.split if model.foreign is not None else None
    if split is not None and split.rounds:  # parts of sums in float64 are rounded to float32 on the way
        wide = max(wide, FP32.epsilon)
    relative = terms * wide
    if dtypes.narrow:
        stored = 2 * (STORED_PER_BLOCK * model.num_layers + 4)
        relative += CONFIDENCE * sqrt(stored) * dtypes.compute.epsilon
        relative += dtypes.reduce.epsilon * sqrt(resolved.global_batch) * CONFIDENCE
    optimizer, muon_slope, moment_epsilon = training.optimizer, 0.0, dtypes.master.epsilon
    match optimizer.name:
        case "adamw" | "paged_adamw":
            pass
        case "adamw_8bit":
            moment_epsilon = FP32.epsilon
        case "muon":
            muon_slope = optimizer.muon_lr * MUON_SLOPE
        case other:
            raise AssertionError(f"the smoothness of {other} is unknown")
    return Tolerance(
        relative=relative,
        rounding=4 * wide,
        slope=optimizer.lr / optimizer.eps,
        muon_slope=muon_slope,
        statistical=dtypes.narrow,
        beta2=optimizer.betas[1],
        moment_rounding=4 * moment_epsilon,
    )
