"""Attention sinks: each head has a learned score of a key without value, which takes a share of the probability.

As in gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025), after Xiao et al. ("Efficient Streaming Language
Models with Attention Sinks", 2024).

Shapes: B batch, T queries, S keys, H heads, G key and value heads, P sequences, R heads that share a key, K head_dim.
"""

from typing import Any

import torch
from torch import nn

from meshwright.models.masks import Documents, Mask
from meshwright.models.partial_attention import PartMask, Queries, attend_part, attend_part_backward
from meshwright.models.slots import Viewed


class Sinks(Viewed):
    """The scores of a layer's heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> torch.Tensor:
        """The scores [H]."""
        return self.view.read(self)["weight"]


def sink_attention(
    q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Softmax attention [B, H, T, K] of queries to the keys that `mask` allows, and to each head's sink."""
    seen: PartMask | None = mask.mask() if isinstance(mask, Documents) else mask
    if seen is None:
        seen = "causal" if q_BHTK.shape[2] > 1 else "all"
    return _SinkAttention.apply(q_BHTK, k_BGSK, v_BGSK, sinks_H, seen)


def add_sinks_(y_BHTK: torch.Tensor, logsumexp_BHT: torch.Tensor, sinks_H: torch.Tensor) -> None:
    """Add the sinks to attention of `attend_part`, in place."""
    total_BHT = torch.logaddexp(logsumexp_BHT, sinks_H.to(logsumexp_BHT)[None, :, None])
    y_BHTK.mul_((logsumexp_BHT - total_BHT).exp()[..., None])
    logsumexp_BHT.copy_(total_BHT)


def sinks_gradient(queries: Queries, sinks_H: torch.Tensor) -> torch.Tensor:
    """The gradient [H] of the sinks: their probability times what the other keys' values add to the loss, negative."""
    grad_BHTK, _, y_BHTK, logsumexp_BHT = queries
    weighted_BHT = (grad_BHTK.to(logsumexp_BHT) * y_BHTK.to(logsumexp_BHT)).sum(-1)
    share_BHT = (sinks_H.to(logsumexp_BHT)[None, :, None] - logsumexp_BHT).exp()
    return -(share_BHT * weighted_BHT).sum((0, 2)).to(sinks_H.dtype)


class _SinkAttention(torch.autograd.Function):
    """A sink is one more part of the keys, whose value is zero."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks_H: torch.Tensor, mask: PartMask):
        y_BHTK, logsumexp_BHT = attend_part(q, k, v, mask)
        add_sinks_(y_BHTK, logsumexp_BHT, sinks_H)
        y_BHTK = y_BHTK.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, y_BHTK, logsumexp_BHT)
        ctx.mask = mask
        return y_BHTK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        q, k, v, sinks_H, y_BHTK, logsumexp_BHT = ctx.saved_tensors
        queries = Queries(grad_outputs[0].contiguous(), q, y_BHTK, logsumexp_BHT)
        grads = attend_part_backward(queries, k, v, ctx.mask)
        return *(grad.to(q.dtype) for grad in grads), sinks_gradient(queries, sinks_H), None


def single_queries(
    q_PGRK: torch.Tensor, k_PGSK: torch.Tensor, v_PGSK: torch.Tensor, mask: torch.Tensor | None, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Attention [P, G, R, K] of sequences that get one token; `mask` is added to scores."""
    wide = torch.promote_types(q_PGRK.dtype, torch.float32)
    scores_PGRS = (q_PGRK @ k_PGSK.mT).to(wide) * q_PGRK.shape[-1] ** -0.5
    scores_PGRS = scores_PGRS if mask is None else scores_PGRS + mask
    sinks_PGR1 = sinks_H.to(scores_PGRS).view(1, q_PGRK.shape[1], -1, 1).expand(len(q_PGRK), -1, -1, 1)
    return torch.cat((scores_PGRS, sinks_PGR1), -1).softmax(-1)[..., :-1].to(v_PGSK.dtype) @ v_PGSK
