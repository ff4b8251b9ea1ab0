"""Next-token prediction: the cross-entropy of every label."""

from typing import Any

import torch

from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.models.loss import IGNORED
from meshwright.objectives.objective import Objective, Sums
from meshwright.spec.batch import Batch


class NextToken(Objective):
    """The cross-entropy of every token that carries loss, in nats."""

    def __str__(self) -> str:
        return "next-token cross-entropy"

    def count(self, batch: Batch[Any]) -> int:
        """Labels."""
        return int((batch.labels != IGNORED).sum())

    def sums(self, hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        """All logits are never held."""
        assert batch.labels is not None
        return Sums(head.loss(hidden_BTD, batch.labels))
