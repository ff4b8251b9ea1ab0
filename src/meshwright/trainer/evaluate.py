"""The one place that measures a model on held-out text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.data.loader import Microbatch
from meshwright.parallel import Passes
from meshwright.parallel.data import release_gathered
from meshwright.parallel.passes import Arguments
from meshwright.trainer.step import count_terms, preference_of, to_device


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out tokens, the same on every rank and for every number of ranks."""

    loss: float
    """Mean loss per token, in nats."""
    tokens: int
    """Tokens that carry loss, or pairs of answers."""
    accuracy: float | None = None
    """Of pairs of answers the share of which the chosen one has become likelier, next to the rejected one, than the
    reference makes it."""
    margin: float | None = None
    """Of pairs of answers the mean of beta (r - r_ref), by how much more than the reference the chosen answer is
    preferred, in nats: the reward's margin (see `models/preference.py`)."""
    sources: dict[str, "Evaluation"] = field(default_factory=dict)
    """The same for each source of data by itself, where there are several."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def joined(parts: dict[str, Evaluation]) -> Evaluation:
    """One evaluation of several sources: each token, or pair, counts alike."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    tokens = sum(part.tokens for part in parts.values())
    loss = sum(part.loss * part.tokens for part in parts.values()) / tokens
    means = {}
    for name in ("accuracy", "margin"):
        known = [getattr(part, name) * part.tokens for part in parts.values() if part.accuracy is not None]
        means[name] = sum(known) / tokens if known else None
    return Evaluation(loss=loss, tokens=tokens, **means, sources=parts)


@torch.no_grad()
def evaluate(
    passes: Passes, microbatches: Iterable[Microbatch], device: torch.device, *, repeats_loss: bool = False
) -> Evaluation:
    """Mean token loss over `microbatches` of all ranks; every rank must bring the same number of them. Collective.

    `repeats_loss`: another rank brings the same microbatches as this one, and counts them.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    preference, references = preference_of(passes.model), []
    if preference is not None:
        preference.seen = []

    def arguments() -> Iterator[Arguments]:
        for microbatch in microbatches:
            totals[1] += count_terms(microbatch, passes.model)
            if microbatch.references is not None:
                references.append(torch.from_numpy(microbatch.references))
            yield to_device(microbatch, device)

    totals[0] = passes.losses(arguments())
    if preference is not None:
        seen, preference.seen = preference.seen or [], None
        if preference.counts:
            for margins, known in zip(seen, references, strict=False):  # stages without a loss have seen none
                gained = margins.cpu() - known  # NaN where there is no such pair
                totals[2] += int((gained > 0).sum())
                totals[3] += preference.beta * gained.nansum()
    release_gathered(passes.model)
    if repeats_loss:
        totals.zero_()
    if dist.is_initialized():
        dist.all_reduce(totals)
    if totals[1] == 0:
        raise ValueError("evaluation: no held-out token to measure on; raise data.held_out or set evaluation.batches=0")
    terms, (loss, accuracy, margin) = int(totals[1]), (totals[[0, 2, 3]] / totals[1]).tolist()
    if not references:
        return Evaluation(loss=loss, tokens=terms)
    return Evaluation(loss=loss, tokens=terms, accuracy=accuracy, margin=margin)
