"""The interface of an objective: a sum over terms and their number, whose ratio over the global batch is the loss.

    class NextToken(Objective):
        def count(self, batch):
            return int((batch.labels != IGNORED).sum())

        def sums(self, hidden_BTD, head, batch):
            return Sums(head.loss(hidden_BTD, batch.labels))

The head computes losses and logits also for a vocabulary that is split over ranks, so the same lines work under every
layout.
"""

from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import given_name


class Sums(NamedTuple):
    """Sums over the terms of a batch, or of several."""

    loss: torch.Tensor
    """A scalar in fp32 (fp64), with its gradient."""
    metrics: dict[str, torch.Tensor] = {}  # noqa: RUF012  (nobody changes it)
    """The sum of each of the objective's metrics, without gradient."""


class Objective(ABC):
    """A training loss: the mean over the terms of the global batch, however they are split over ranks."""

    term: ClassVar[str] = "token"
    """The name of a term in printed lines."""
    over: ClassVar[Literal["tokens", "rows"]] = "tokens"
    """Whether a term belongs to a token or to a row. If ranks share rows, each rank sums the terms of its own tokens;
    the terms of a row are known to all of its ranks (`Head.row_sums`), and one of them counts them."""
    needs_pairs: ClassVar[bool] = False
    """Whether the data must be pairs of answers."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of metrics that evaluation reports in addition to the loss, each a mean over terms."""

    def __str__(self) -> str:
        """Its description in the banner."""
        return given_name(self)

    @property
    def needs_reference(self) -> bool:
        """Whether the objective needs the starting model's margin of every pair, computed before the first step."""
        return False

    @abstractmethod
    def count(self, batch: Batch[Any]) -> int:
        """The number of terms in a batch's rows, counted on the host before the forward pass."""

    @abstractmethod
    def sums(self, hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        """The sums over the terms of a batch.

        Args:
            hidden_BTD: the last hidden states, after the final norm, the input of `head`.
            head: computes logits, log-probabilities and losses from them.
            batch: labels, and the other inputs of the objective.
        """


def check_sums(objective: Objective, sums: Sums) -> Sums:
    """The sums; raises `UserError` if the objective has returned anything else."""
    where = f"training.objective: {given_name(objective)}.sums"
    if not isinstance(sums, Sums):
        raise UserError(f"{where} returns {type(sums).__name__}; return meshwright.Sums(loss, metrics)")
    for name, value in {"the loss": sums.loss, **sums.metrics}.items():
        if not isinstance(value, torch.Tensor) or value.dim():
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{where}: {name} is a {what}; return the sum over the batch's terms, a scalar tensor")
    if missing := [name for name in objective.metrics if name not in sums.metrics]:
        raise UserError(f"{where} returns no {missing[0]!r}, which {given_name(objective)}.metrics lists")
    return sums


def check_count(objective: Objective, count: Any) -> int:
    """The number of terms; raises `UserError` if an objective has counted something else."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        where = f"training.objective: {given_name(objective)}.count"
        raise UserError(
            f"{where} returns {count!r}; return the number of terms in the batch, a whole number, at least 0"
        )
    return int(count)
