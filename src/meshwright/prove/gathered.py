"""Quantized collectives in a proof: one process computes with the weights that ranks gather, and gradients may differ
by half the quantization steps that ranks report.

Gathered weights are a function of the weights and of the ranks' split. The reference computes with exactly these
weights (`as_gathered`), so the tolerance does not change. The rounding of a sum of gradients depends on each rank's
share. Every reduction knows its scales, and therefore its largest possible error (`parallel.quantized.Rounding`). With
error feedback a step differs by the errors that ranks carry into it and out of it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import nn

from meshwright.comm.objects import gather_everywhere
from meshwright.families.split import expert_shard_dim, is_experts, shard_dim, split_dim, split_range
from meshwright.parallel.quantized import Rounding, reductions
from meshwright.prove.tolerance import Facts
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.pieces import PIECES
from meshwright.spec.quantized import BITS, Sent, levels
from meshwright.trainer.setup import Trainer


@contextmanager
def as_gathered(trainer: Trainer, layout: LayoutSpec) -> Iterator[None]:
    """Inside the block, one process computes with the weights that the layout's ranks would gather."""
    sent, kept = layout.quantized_weights, list[tuple[torch.Tensor, torch.Tensor]]()
    parameters = dict(trainer.model.named_parameters()) if sent in BITS else {}  # fp8 products read codes anyway
    with torch.no_grad():
        for row in trainer.table:
            if row.name in parameters and len(row.shape) > 1:
                weight = parameters[row.name]
                kept.append((weight, weight.detach().clone()))
                for part in parts(weight.detach(), row, trainer.resolved.model, layout):
                    round_blocks(part, sent)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


def round_blocks(part: torch.Tensor, sent: Sent) -> None:
    """The definition of quantization, in place: the largest magnitude of each block of a row is the largest code."""
    for block in part.split(PIECES.get().block, dim=-1):
        scale = block.abs().amax(-1, keepdim=True).to(torch.float32) / levels(sent)
        block.div_(scale.masked_fill(scale == 0, 1)).round_().mul_(scale)


def parts(whole: torch.Tensor, row: Parameter, model: ModelSpec, layout: LayoutSpec) -> Iterable[torch.Tensor]:
    """Views of the part that each of ZeRO's ranks keeps of a parameter (as in `families.split.kept_shape`); empty if
    one rank keeps all."""
    if is_experts(row):
        shards = layout.expert_shard
        cut = (0, layout.ep), (expert_shard_dim(row.shape, shards, split=layout.ep > 1), shards)
    else:
        shards = layout.shard
        cut = (split_dim(row, model, layout.tp), layout.tp), (shard_dim(row, model, layout), shards)
    if shards == 1:
        return
    pieces = [whole]
    for dim, ranks in cut:
        if dim is not None:
            pieces = [piece for one in pieces for piece in _split(one, dim, ranks)]
    yield from (piece for piece in pieces if piece.numel())


def _split(whole: torch.Tensor, dim: int, ranks: int) -> Iterator[torch.Tensor]:
    for rank in range(ranks):
        start, stop = split_range(whole.shape[dim], ranks, rank)
        yield whole.narrow(dim, start, stop - start)


@dataclass
class QuantizationRoom:
    """The largest possible effect of quantization on a step's gradients, as scaled; the same on every rank."""

    most: dict[str, float] = field(default_factory=dict)
    """By parameter: the largest error of any number."""
    norm: float = 0.0
    """The norm of the error of all gradients."""

    def of(self, name: str) -> float:
        """The largest error of any number of a parameter's gradient."""
        return self.most.get(name, 0.0)

    def after_clipping(self, name: str, facts: Facts) -> float:
        """The same after clipping by the norm, without the error of the factor itself."""
        share = self.norm / facts["gnorm"] if facts["gnorm"] else 0.0
        return (self.of(name) + facts["largest"] * share) * (1 + share)


@contextmanager
def recorded_rounding(model: nn.Module) -> Iterator[Rounding]:
    """Inside the block, reductions of this rank's gradients record their rounding."""
    rounding, ours = Rounding(), reductions(model)
    for reduction in ours:
        reduction.rounding = rounding
    try:
        yield rounding
    finally:
        for reduction in ours:
            reduction.rounding = None


def room_of(rounding: Rounding, layout: LayoutSpec, *, tied: bool) -> QuantizationRoom:
    """The allowance that all ranks' roundings together explain. Collective."""
    replicas = max(layout.replicate, layout.expert_replicate)  # each has rounded its own sum
    copies = replicas * (2 if tied and layout.pp > 1 else 1)
    most, squares = dict[str, float](), 0.0
    for of_rank in gather_everywhere(
        {name: (float(rounding.most[name]), float(rounding.norms[name])) for name in rounding.most}
    ):
        for name, (largest, norm) in of_rank.items():
            most[name], squares = max(most.get(name, 0.0), copies * largest), squares + norm * norm
    return QuantizationRoom(most, copies * sqrt(squares))
