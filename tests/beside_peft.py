"""Training alongside peft: the same batches; each step's loss and every gradient are compared."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.batch import to_device
from meshwright.testing.equivalence import loader_for
from meshwright.trainer.setup import Trainer

STEPS = 20


def train_beside(
    trainer: Trainer,
    theirs: Any,
    counterparts: Mapping[str, torch.nn.Parameter],
    *,
    loss_room: float,
    gradient_room: float,
    as_theirs: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, gradient: gradient,
) -> None:
    """Train `theirs` with AdamW as `trainer` trains; `counterparts` are its parameters by our names.

    Losses may differ by the relative `loss_room`, gradients by `gradient_room` times the largest number; `as_theirs`
    converts a gradient of ours to the shape of theirs.
    """
    spec = trainer.resolved.run.training.optimizer
    optimizer = torch.optim.AdamW(
        counterparts.values(), lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    losses = []
    with loader_for(trainer) as loader:
        for step in range(STEPS):
            (batch,) = loader.microbatches(step % 2)
            here = to_device(batch, torch.device("cpu"))
            assert here.labels is not None
            optimizer.zero_grad()
            expected = F.cross_entropy(theirs(here.tokens).logits.flatten(0, 1), here.labels.flatten())
            expected.backward()
            loss, _ = trainer.train_step.gradients([batch])
            losses.append(loss)
            assert loss == pytest.approx(expected.item(), rel=loss_room), step
            gradients = {name: parameter.grad for name, parameter in counterparts.items()}
            largest = max(gradient.abs().max().item() for gradient in gradients.values())  # type: ignore[union-attr]
            for name, gradient in gradients.items():
                ours = as_theirs(name, trainer.parameters[name].grad)  # type: ignore[arg-type]
                assert (ours - gradient).abs().max() <= gradient_room * largest, (step, name)
            trainer.train_step.update(step + 1, trainer.train_step.gradient_norm())
            trainer.optimizers.zero_grad()
            optimizer.step()
    assert losses[-2] < 0.98 * losses[0]  # the loss has fallen
