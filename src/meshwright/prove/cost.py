"""The cost of low precision and of quantized gathers: the difference from the same step without them, on one
process."""

from dataclasses import dataclass
from math import sqrt

import torch

from meshwright.prove.reference import Reference, build_alone, load_weights, loader_for
from meshwright.spec.run import ResolvedRun


@dataclass(frozen=True)
class Cost:
    """A step in low precision, compared with the same step from the same weights without it."""

    step: int
    beside: str
    """The dtype of the step without low precision, and how its weights are gathered."""
    loss: float
    """The loss without low precision."""
    gradients: float
    """Norm of the difference of all gradients, over the norm of all gradients without low precision."""
    worst: str
    """The parameter whose gradient differs most relative to its norm."""
    worst_by: float


def measure_cost(resolved: ResolvedRun, reference: Reference, step: int) -> Cost | None:
    """The effect of low precision and of quantized gathers on a step of the reference; None if the run has neither."""
    training = resolved.run.training
    if training.product_recipe is None and resolved.run.layout.quantized_weights == "none":
        return None
    plain = training.without_low_precision()
    run = resolved.run.model_copy(update={"training": plain})
    trainer = build_alone(resolved.model_copy(update={"run": run}))
    load_weights(trainer, reference, step - 1)
    with loader_for(trainer) as loader:
        loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
    difference, length, worst, worst_by = 0.0, 0.0, "", 0.0
    for name, parameter in trainer.parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        by, size = (gradient - reference.gradient(step, name)).norm().item(), gradient.norm().item()
        difference, length = difference + by * by, length + size * size
        if size and by / size >= worst_by:
            worst, worst_by = name, by / size
    gathers = " with unquantized weights" if resolved.run.layout.quantized_weights == "int8" else ""
    beside = f"{plain.precision}{gathers}"
    return Cost(step, beside, loss, sqrt(difference / length) if length else 0.0, worst, worst_by)
