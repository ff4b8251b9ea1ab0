"""Comparison of losses by rank: each rank's own sums over its microbatches, before the sum over ranks, with the
reference's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.objectives import Objective, Sums
from meshwright.parallel import Passes
from meshwright.spec.batch import Batch


class Recorded(Objective):
    """An objective that records the loss and the number of terms of each microbatch."""

    def __init__(self, inner: Objective) -> None:
        self.inner = inner
        self.term, self.over, self.metrics = inner.term, inner.over, inner.metrics  # type: ignore[misc]
        self.needs_pairs = inner.needs_pairs  # type: ignore[misc]
        self.found: list[tuple[torch.Tensor, int]] = []

    def count(self, batch: Batch[Any]) -> int:
        """See `Objective`."""
        return self.inner.count(batch)

    def sums(self, hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        """See `Objective`."""
        sums = self.inner.sums(hidden_BTD, head, batch)
        self.found.append((sums.loss.detach(), self.inner.count(batch)))
        return sums

    def terms(self) -> list[tuple[float, int]]:
        """(summed loss, number of terms) of each microbatch so far."""
        return [(loss.item(), count) for loss, count in self.found]


@contextmanager
def recorded(passes: Passes) -> Iterator[Recorded]:
    """Records the losses of `passes` inside the context."""
    objective = passes.objective
    passes.objective = Recorded(objective)
    try:
        yield passes.objective
    finally:
        passes.objective = objective


@dataclass(frozen=True)
class Share:
    """One rank's own losses."""

    rank: int
    data_rank: int
    tp_rank: int
    terms: list[tuple[float, int]]
    """(summed loss, number of terms) of each of its microbatches; empty on a rank without the head."""


@dataclass(frozen=True)
class WrongLoss:
    """A wrong loss of a microbatch on some ranks."""

    ranks: tuple[int, ...]
    microbatch: int
    """Index among these ranks' microbatches."""
    loss: float
    expected: float
    terms: int
    expected_terms: int


def find_wrong_loss(
    shares: Sequence[Share], reference: Sequence[tuple[float, int]], *, over_tokens: bool, relative: float
) -> WrongLoss | None:
    """The first microbatch whose loss differs from the reference's.

    Args:
        shares: of all ranks.
        reference: of all the step's microbatches, in the order of the data-parallel ranks that have them.
        over_tokens: whether each of the ranks that share rows has only the loss of its own tokens.
        relative: the allowed relative difference of a loss.
    """
    groups: dict[tuple[int, int], list[Share]] = {}
    for share in shares:
        if share.terms:
            groups.setdefault((share.data_rank, share.tp_rank), []).append(share)
    for (data_rank, _), group in groups.items():
        for number in range(len(group[0].terms)):
            of_ranks = [share.terms[number] for share in group]
            parts = [of_ranks] if over_tokens else [[one] for one in of_ranks]
            loss, terms = reference[data_rank * len(group[0].terms) + number]
            for part in parts:
                ours, counted = sum(loss for loss, _ in part), sum(count for _, count in part)
                if not abs(ours - loss) <= relative * abs(loss) or counted != terms:
                    ranks = tuple(share.rank for share in group)
                    return WrongLoss(ranks, number, ours, loss, counted, terms)
    return None
