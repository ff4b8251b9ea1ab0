"""Gradient noise scale: the batch size beyond which more samples a step help little."""

import math
from collections.abc import Sequence
from typing import Any

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.spec.errors import UserError


class GradientNoiseScale(Callback):
    """Measures the simple noise scale `tr(Sigma) / |G|^2` of McCandlish et al., "An Empirical Model of Large-Batch
    Training" (2018), appendix A.1, every this many steps.

    The next batch is cut into two halves, microbatch by microbatch. Their gradients and the whole batch's give unbiased
    estimates of |G|^2 and tr(Sigma); each is averaged over measurements before the division, as the paper does. The
    cost is twice a step's forward and backward passes at every measurement. Weights and data are left alone.
    """

    def __init__(self, every: int = 20, *, decay: float = 0.9) -> None:
        """`every`: steps between measurements; `decay`: of the two averages over measurements, in [0, 1)."""
        if not isinstance(every, int) or every < 1:
            raise UserError(f"GradientNoiseScale: every={every!r} must be a whole number, at least 1")
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise UserError(f"GradientNoiseScale: decay={decay!r} must be a number in [0, 1)")
        self.every, self.decay = every, decay
        self.averages: list[float] = []
        """Of |G|^2 and tr(Sigma); empty before the first measurement."""

    def on_start(self, training: Training) -> None:
        """Refuse a batch that has no two parts."""
        if not training.step:
            self.averages = []
        if len(training.next_batch().terms) < 2:
            raise UserError(
                "GradientNoiseScale compares two halves of a batch, but each step has one microbatch on one "
                "replica; set training.micro_batch to at most half of training.global_batch, or use data parallelism"
            )

    def on_step(self, training: Training, record: Record) -> None:
        """Measure if a measurement is due."""
        if training.step % self.every:
            return
        batch = training.next_batch()
        half = len(batch.terms) // 2
        first, second = sum(batch.terms[:half]), sum(batch.terms[half:])
        total = first + second
        if not first or not second:
            return  # a half without any label has no gradient
        signs = [1 / first] * half + [-1 / second] * (len(batch.terms) - half)
        whole, contrast = batch.gradient_norm([1 / total] * len(batch.terms)), batch.gradient_norm(signs)
        estimates = unbiased(whole, contrast, first, second)
        if not all(map(math.isfinite, estimates)):
            return
        old = self.averages or estimates
        self.averages = [self.decay * a + (1 - self.decay) * b for a, b in zip(old, estimates, strict=True)]
        square, trace = self.averages
        scale = max(trace, 0.0) / square if square > 0 else None
        sequences = None if scale is None else scale * batch.num_sequences / total
        names = ("gradient_square", "trace")
        training.log("noise_scale", terms=scale, sequences=sequences, **dict(zip(names, estimates, strict=True)))
        if sequences is None:
            text = "not yet known: the gradient is smaller than its noise"
        else:
            text = f"{sequences:.3g} sequences a step (now {batch.num_sequences})"
        training.say(f"step {training.step}  gradient noise scale {text}")

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = list(state["averages"])


def unbiased(whole: float, contrast: float, first: int, second: int) -> Sequence[float]:
    """Unbiased estimates of |G|^2, G being the true gradient, and of tr(Sigma), the variance of one term's gradient.

    `whole` is the norm of the mean gradient over all terms, `contrast` the norm of the difference between the mean
    gradients of two parts with this many terms. Since E|G_B|^2 = |G|^2 + tr(Sigma) / B for a batch of B terms, and
    E|G_1 - G_2|^2 = tr(Sigma) (1/B_1 + 1/B_2), this is the paper's estimate from small and big batches: for two equal
    halves, its mean over them as the small one, term by term.
    """
    trace = contrast**2 / (1 / first + 1 / second)
    return whole**2 - trace / (first + second), trace
