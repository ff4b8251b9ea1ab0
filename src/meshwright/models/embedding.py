"""Embeddings: rows looked up by number, through the same stack of ops as every layer.

Shapes: B batch, T sequence, D hidden, V rows.
"""

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.slots import Layer, Op, OpPosition, Weights


class LookUp(Op):
    """The rows [B, T, D] of numbers [B, T], int64."""

    place = OpPosition.PRODUCT

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[B, T] to [B, T, D]."""
        return F.embedding(x, weights["weight"])

    def merged(self, weights: Weights) -> Weights:
        """The embedding's own parameters."""
        return {"weight": weights["weight"]}

    def __repr__(self) -> str:
        return "look up"


class Embedding(Layer, nn.Embedding):
    """`nn.Embedding` with slots and without initialization: on the meta device torch's own initialization loads torch's
    compiler, which takes seconds."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width))
        self.ops = (LookUp(),)
