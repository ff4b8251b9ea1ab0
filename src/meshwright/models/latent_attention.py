"""Multi-head latent attention: queries, keys and values projected from narrow latents.

Shapes: B batch, T sequence, D hidden, H heads, K head_dim = P + R (P without positions, R rotated), V v_head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.attention import Attention, Mask
from meshwright.models.cache import LayerCache
from meshwright.models.linear import Linear
from meshwright.models.norm import RMSNorm
from meshwright.models.rope import RopeTables, apply_rope, attention_scale
from meshwright.spec.layers import LatentSpec
from meshwright.spec.model import ModelSpec

LATENT_NORM_EPS = 1e-6
"""The latents' norms use this epsilon, as published, whatever the model's other norms use."""


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): each head's keys and values are
    expanded from one latent, except a rotated part of the key that all heads share."""

    def __init__(self, spec: ModelSpec, layer: int = 0):
        nn.Module.__init__(self)
        latent = spec.layer(layer).mixer
        assert isinstance(latent, LatentSpec)
        heads = latent.heads
        self.window, self.sinks = None, None
        self.widths_PR, self.widths_PV = (latent.nope, latent.rotated), (latent.nope, latent.value_dim)
        self.widths_latent = (latent.kv_rank, latent.rotated)
        self.scale = attention_scale(latent.rope)
        self.wq = Linear(spec.hidden, heads * latent.head_dim, bias=False) if latent.q_rank is None else None
        if latent.q_rank is not None:
            self.wq_a = Linear(spec.hidden, latent.q_rank, bias=False)
            self.q_norm = RMSNorm(latent.q_rank, eps=LATENT_NORM_EPS)
            self.wq_b = Linear(latent.q_rank, heads * latent.head_dim, bias=False)
        self.wkv_a = Linear(spec.hidden, sum(self.widths_latent), bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, eps=LATENT_NORM_EPS)
        self.wkv_b = Linear(latent.kv_rank, heads * sum(self.widths_PV), bias=False)
        self.wo = Linear(heads * latent.value_dim, spec.hidden, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, rope: RopeTables | None = None, mask: Mask = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Like `Attention.forward`. The cache holds expanded keys and values, the latter padded to the keys' width."""
        assert rope is not None
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        q_BTC = self.wq_b(self.q_norm(self.wq_a(x_BTD))) if self.wq is None else self.wq(x_BTD)
        q_BTHP, q_BTHR = q_BTC.unflatten(-1, (-1, sum(self.widths_PR))).split(self.widths_PR, -1)
        latent_BTC, k_BTR = self.wkv_a(x_BTD).split(self.widths_latent, -1)
        kv_BTHC = self.wkv_b(self.kv_norm(latent_BTC)).unflatten(-1, (-1, sum(self.widths_PV)))
        k_BTHP, v_BTHV = kv_BTHC.split(self.widths_PV, -1)
        q_BTHR = apply_rope(_halves(q_BTHR), rope)
        k_BT1R = apply_rope(_halves(k_BTR.unsqueeze(-2)), rope)
        # YaRN's scale is applied to the queries, and values are padded to the keys' width, so every attention kernel
        # works unchanged.
        q_BTHK = torch.cat((q_BTHP, q_BTHR), -1) * self.scale
        k_BTHK = torch.cat((k_BTHP, k_BT1R.expand(*k_BTHP.shape[:-1], -1)), -1)
        v_BTHK = F.pad(v_BTHV, (0, k_BTHK.shape[-1] - v_BTHV.shape[-1]))
        y_BTHK = self.attend((q_BTHK, k_BTHK, v_BTHK), mask, cache)
        return self.wo(y_BTHK[..., : v_BTHV.shape[-1]].flatten(-2))


def _halves(x_BTHR: torch.Tensor) -> torch.Tensor:
    """Moves rotated pairs from (2 i, 2 i + 1), the order in these weights, to (i, i + R / 2), the order of
    `apply_rope`. Queries and keys are permuted the same way, so their products do not change."""
    return x_BTHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
