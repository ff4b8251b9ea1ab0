"""A model measured on held-out data: the objective's loss and metrics."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from meshwright.comm import collectives
from meshwright.data.loader import HostBatch
from meshwright.models.batch import TensorBatch, to_device
from meshwright.parallel import Passes
from meshwright.parallel.data import release_gathered
from meshwright.spec.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out data; equal on every rank, and for every number of ranks."""

    loss: float
    """Mean loss per term: nats per token, or an objective's own."""
    tokens: int
    """Number of terms: tokens that carry loss, or pairs of answers."""
    term: str = "token"
    """Name of a term."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, each a mean over terms (`Objective.metrics`)."""
    sources: dict[str, "Evaluation"] = field(default_factory=dict)
    """The same for each source of data, if there are several."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def joined(parts: dict[str, Evaluation]) -> Evaluation:
    """The evaluation over several sources; all terms have the same weight."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    tokens = sum(part.tokens for part in parts.values())
    loss = sum(part.loss * part.tokens for part in parts.values()) / tokens
    names = next(iter(parts.values())).metrics
    metrics = {name: sum(part.metrics[name] * part.tokens for part in parts.values()) / tokens for name in names}
    term = next(iter(parts.values())).term
    return Evaluation(loss=loss, tokens=tokens, term=term, metrics=metrics, sources=parts)


def evaluate(
    passes: Passes, microbatches: Iterable[HostBatch], device: torch.device, *, repeats_loss: bool = False
) -> Evaluation:
    """Means over the terms of `microbatches` of all ranks; every rank must have the same number of them. Collective.

    `repeats_loss`: another rank has and counts the same microbatches.
    """
    terms = 0

    def batches() -> Iterator[TensorBatch]:
        nonlocal terms
        for microbatch in microbatches:
            terms += passes.count(microbatch)
            yield to_device(microbatch, device)

    loss, metrics = passes.evaluate(batches())
    sums = loss, *metrics.values(), torch.tensor(terms, dtype=torch.float64)
    totals = torch.stack([part.to(device) for part in sums])
    release_gathered(passes.model)
    if repeats_loss:
        totals.zero_()
    *totals_of, number = collectives.all_reduce_(totals).tolist()
    if not number:
        raise UserError("evaluation: there are no held-out tokens; raise data.held_out or set evaluation.batches=0")
    mean_loss, *means = (total / number for total in totals_of)
    means_of = dict(zip(metrics, means, strict=True))
    return Evaluation(loss=mean_loss, tokens=int(number), term=passes.objective.term, metrics=means_of)
