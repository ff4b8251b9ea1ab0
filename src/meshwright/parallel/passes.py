"""The one place that takes microbatches through a whole model; `pipeline.py` does the same for a model in stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

Arguments = tuple[torch.Tensor | None, ...]
"""A microbatch as the model takes it, in the order of `Decoder.forward`: tokens, labels, documents, ..."""

GradientSync = Callable[[Iterable[nn.Module], bool], None]
"""(modules, whether their accumulation ends with it) -> None, before a backward pass through the modules."""


class Passes(Protocol):
    """How microbatches go through a model: what the trainer knows of the strategy that runs."""

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses; other pipeline stages' ranks return 0."""
        ...

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters here that are copies of another pipeline stage's; the gradient's norm counts them there."""
        ...

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other pipeline stages of the same share of the model."""
        ...

    @property
    def has_gradient(self) -> bool:
        """Whether the last `backward` or `drain` left a gradient; the first of an asynchronous pipeline does not."""
        ...

    def backward(self, microbatches: Sequence[Arguments], scale: float) -> torch.Tensor:
        """Add the gradient of the microbatches' summed losses, times `scale`, to the parameters' gradients.

        An asynchronous pipeline leaves the gradient of the microbatches that it was given the time before.

        Returns the sum of the losses, a scalar in fp64. Collective.
        """
        ...

    def drain(self) -> bool:
        """Leave the gradient of what the last `backward` left under way; whether there was any. Collective."""
        ...

    def losses(self, microbatches: Iterable[Arguments]) -> torch.Tensor:
        """The sum of the microbatches' losses, a scalar in fp64, without gradients. Collective.

        Of one microbatch without labels: the logits [B, V] that it asks for, in fp64; 0 on ranks without `has_loss`.
        """
        ...


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Whatever dropout the model has is off meanwhile."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class WholeModel:
    """Every microbatch through the whole model, forward and backward, one after another."""

    has_loss = has_gradient = True
    counted_elsewhere: frozenset[str] = frozenset()
    stages = None

    def __init__(self, model: nn.Module, sync: GradientSync = lambda modules, last: None) -> None:
        self.model, self.sync = model, sync

    def backward(self, microbatches: Sequence[Arguments], scale: float) -> torch.Tensor:
        """See `Passes`."""
        total = torch.zeros((), dtype=torch.float64)
        for index, arguments in enumerate(microbatches):
            self.sync(self.model.modules(), index == len(microbatches) - 1)
            loss = self.model(*arguments)
            (loss * scale).backward()
            total = total.to(loss.device) + loss.detach()
        return total

    def drain(self) -> bool:
        """See `Passes`."""
        return False

    @torch.no_grad()
    def losses(self, microbatches: Iterable[Arguments]) -> torch.Tensor:
        """See `Passes`."""
        total = torch.zeros((), dtype=torch.float64)
        with evaluating(self.model):
            for arguments in microbatches:
                loss = self.model(*arguments)
                total = total.to(loss.device) + loss
        return total
