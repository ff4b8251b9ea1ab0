"""The one place that measures a model on held-out text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.data.loader import Microbatch
from meshwright.models.loss import IGNORED
from meshwright.parallel import Passes
from meshwright.parallel.data import release_gathered
from meshwright.parallel.passes import Arguments
from meshwright.trainer.step import to_device


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out tokens, the same on every rank and for every number of ranks."""

    loss: float
    """Mean loss per token, in nats."""
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    passes: Passes, microbatches: Iterable[Microbatch], device: torch.device, *, repeats_loss: bool = False
) -> Evaluation:
    """Mean token loss over `microbatches` of all ranks; every rank must bring the same number of them. Collective.

    `repeats_loss`: another rank brings the same microbatches as this one, and counts them.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)

    def arguments() -> Iterator[Arguments]:
        for microbatch in microbatches:
            totals[1] += int((microbatch.labels != IGNORED).sum())
            yield to_device(microbatch, device)

    totals[0] = passes.losses(arguments())
    release_gathered(passes.model)
    if repeats_loss:
        totals.zero_()
    if dist.is_initialized():
        dist.all_reduce(totals)
    if totals[1] == 0:
        raise ValueError("evaluation: no held-out token to measure on; raise data.held_out or set evaluation.batches=0")
    return Evaluation(loss=(totals[0] / totals[1]).item(), tokens=int(totals[1]))
