"""Forward and backward passes of batches: one interface for whole models and pipeline stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.devices import widest
from meshwright.models import Decoder
from meshwright.models.batch import TensorBatch
from meshwright.models.decoder import Read
from meshwright.models.head import Head
from meshwright.objectives import Objective, Sums
from meshwright.objectives.objective import check_count, check_sums
from meshwright.spec.batch import Batch

Scale = float | Sequence[float]
"""The factor of losses before backward passes: one for all batches, or one for each."""


def scale_of(scale: Scale, index: int) -> float:
    """The factor of one batch's loss."""
    return scale[index] if isinstance(scale, Sequence) else scale


class GradientSync:
    """The calls around backward passes to a strategy that shards `model`. This one shards nothing and does nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def announce(self, modules: Iterable[nn.Module], last: bool) -> None:
        """Called before a backward pass through `modules`; `last`: their last one before the optimizer steps."""

    def hold(self, modules: Iterable[nn.Module]) -> None:
        """Called before a backward pass whose weight gradients are deferred; `reduce` is called after they are
        computed."""

    def reduce(self, modules: Iterable[nn.Module], last: bool) -> None:
        """Called when the deferred gradients of `modules` have been added, after the backward pass."""

    def release(self) -> None:
        """Called after a step's last backward pass through a pipeline, because a later pass through one stage gathers
        the weights of all stages of the rank."""

    def inside(self) -> Callable[..., torch.Tensor]:
        """The forward pass of stages without embedding and head, on ranks where another stage has one."""
        return self.model.forward


class Passes(ABC):
    """The trainer's interface to the strategy in use. All methods are collective.

    Sums and logits are zeros on ranks without `has_loss`, which hold other pipeline stages.
    """

    has_loss = True
    """Whether this rank has the head."""
    late = False
    """Whether `train` adds the gradient of the previous call's batches, and none the first time."""
    stages: dist.ProcessGroup | None = None
    """The ranks that hold the other pipeline stages of the same share of the model."""

    def __init__(self, model: Decoder, objective: Objective) -> None:
        """`model`: this rank's part of it."""
        self.model, self.objective = model, objective

    @abstractmethod
    def train(self, batches: Sequence[TensorBatch], scale: Scale) -> torch.Tensor:
        """Add the gradient of the batches' summed losses, times `scale`, to the parameters' gradients.

        Returns the sum of the losses, a scalar in fp64.
        """

    def flush(self) -> None:
        """Add the gradient that `train` still owes; called only if `late`."""
        raise NotImplementedError

    @abstractmethod
    def read(self, batches: Iterable[TensorBatch], read: Read) -> Iterator[Any]:
        """The result of `read` on the last hidden states of each batch, without gradients.

        All ranks must exhaust it; without `has_loss` it is empty.
        """

    def evaluate(self, batches: Iterable[TensorBatch]) -> Sums:
        """The objective's sums over all terms that this rank counts, each a scalar in fp64."""
        names, total = self.objective.metrics, torch.zeros(1 + len(self.objective.metrics), dtype=torch.float64)
        for sums in self.read(batches, self.sums):
            parts = sums.loss, *(sums.metrics[name] for name in names)
            added = torch.stack([part.to(widest(part)) for part in parts])
            total = total.to(added) + added
        loss, *metrics = total
        return Sums(loss, dict(zip(names, metrics, strict=True)))

    def token_logprobs(self, batch: TensorBatch) -> torch.Tensor:
        """The log-probability of each label [B, T], in nats and fp32 (fp64); 0 without a label."""
        labels_BT = batch.labels
        assert labels_BT is not None
        results = list(self.read([batch], lambda x_BTD, head, _: -head.token_losses(x_BTD, labels_BT)))
        return results[0] if results else torch.zeros(labels_BT.shape)

    def next_logits(self, batch: TensorBatch, asked_BT: torch.Tensor) -> torch.Tensor:
        """The logits [B, V] of the one position in each row that `asked_BT` [B, T], bool, marks."""
        results = list(self.read([batch], lambda x_BTD, head, _: head.next_logits(x_BTD, asked_BT)))
        return results[0] if results else torch.zeros(len(asked_BT), self.model.spec.vocab)

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """This rank's parameters that are copies of another pipeline stage's; the gradient norm counts them there."""
        return frozenset()

    @property
    def counts(self) -> bool:
        """Whether this rank counts the terms of its rows; else another rank that shares the rows does."""
        sequence = self.model.head_split.sequence
        return self.objective.over == "tokens" or sequence is None or sequence.counts

    def count(self, batch: Batch[Any]) -> int:
        """How many terms of a batch this rank counts."""
        return check_count(self.objective, self.objective.count(batch)) if self.counts else 0

    def sums(self, x_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        """A `Read`: the objective's sums over the terms that this rank counts; gradients cover all terms."""
        sums = check_sums(self.objective, self.objective.sums(x_BTD, head, batch))
        if self.counts:
            return sums
        return Sums(sums.loss - sums.loss.detach(), {name: torch.zeros_like(x) for name, x in sums.metrics.items()})

    def loss(self, x_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> torch.Tensor:
        """A `Read`: the loss of `sums`."""
        return self.sums(x_BTD, head, batch).loss

    def working_copies(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Tensors kept between steps, besides the parameters, by kind (`weights`, `gradients`)."""
        return {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disables the model's dropout inside the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class WholeModel(Passes):
    """Every batch through the whole model, forward and backward, one after another."""

    def __init__(self, model: Decoder, objective: Objective, sync: GradientSync | None = None) -> None:
        super().__init__(model, objective)
        self.sync = GradientSync(model) if sync is None else sync

    def train(self, batches: Sequence[TensorBatch], scale: Scale) -> torch.Tensor:
        losses = []
        for index, batch in enumerate(batches):
            self.sync.announce(self.model.modules(), index == len(batches) - 1)
            loss = self.model(batch, self.loss)
            (loss * scale_of(scale, index)).backward()
            losses.append(loss.detach().to(widest(loss)))
        return torch.stack(losses).sum()

    @torch.no_grad()
    def read(self, batches: Iterable[TensorBatch], read: Read) -> Iterator[Any]:
        with evaluating(self.model):
            for batch in batches:
                yield self.model(batch, read)
