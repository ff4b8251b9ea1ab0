"""Layers with the gated delta rule: a short convolution of queries, keys and values, the rule, and a gated norm.

Shapes: B batch, T sequence, D hidden, W queries, keys and values together, J tokens of the convolution, G key heads, H
value heads, K key width, V value width, P sequences that get one token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.delta_rule import Heads, gated_delta_rule, of_length_one, one_token
from meshwright.models.linear import Linear
from meshwright.models.masks import Documents, Mask
from meshwright.models.norm import RMSNorm
from meshwright.models.rope import RopeTables
from meshwright.models.slots import Entry, Viewed
from meshwright.models.states import StateCache
from meshwright.spec.layers import GatedDeltaSpec
from meshwright.spec.model import ModelSpec


class Pieces:
    """The runs of a sequence that are computed here; by default the whole. A strategy whose ranks hold parts of every
    sequence fills `GatedDelta.pieces`."""

    def apart(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T, ...] to runs that follow one another [B', T', ...]."""
        return x_BT

    def together(self, x_BT: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        return x_BT

    def documents(self, mask: Mask, before: int) -> torch.Tensor | None:
        """The documents of each run's tokens and of the `before` ones ahead, -1 for none: [B', before + T']."""
        return F.pad(mask.documents_BT, (before, 0), value=-1) if isinstance(mask, Documents) else None

    def ahead(self, x_BTW: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` tokens before each run [B', count, W], zeros before the first."""
        return x_BTW.new_zeros(len(x_BTW), count, x_BTW.shape[2])

    def rule(self, heads: Heads, documents: torch.Tensor | None) -> torch.Tensor:
        """The outputs [B', T', H, V] of runs."""
        return gated_delta_rule(heads, documents)[0]

    def __repr__(self) -> str:
        return "whole sequences"


class Convolution(Viewed):
    """A causal convolution of each channel over J tokens."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))

    def forward(self, x_BTW: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """[B, J - 1 + T, W], the first J - 1 tokens being those before, to [B, T, W]; `documents` of all."""
        weight_WJ = self.view.read(self)["weight"].squeeze(1)
        length, same = x_BTW.shape[1] - weight_WJ.shape[1] + 1, None
        if documents is not None:
            earlier = [documents[:, tap : tap + length] for tap in range(weight_WJ.shape[1] - 1)]
            same = (torch.stack(earlier) == documents[:, -length:])[..., None]
        if torch.compiler.is_compiling():  # it cannot trace functions with their own gradients
            return _convolved(x_BTW, weight_WJ, same)
        return _Convolved.apply(x_BTW, weight_WJ, same)


def _convolved(x_BTW: torch.Tensor, weight_WJ: torch.Tensor, same: torch.Tensor | None) -> torch.Tensor:
    """The sum of shifted inputs, each by its number of every channel; `same`: whether an input is of the output's
    document, [J - 1, B, T, 1]."""
    taps, length = weight_WJ.shape[1], x_BTW.shape[1] - weight_WJ.shape[1] + 1
    y_BTW = x_BTW[:, taps - 1 :] * weight_WJ[:, -1]
    for tap in range(taps - 1):
        part_BTW, weight_W = x_BTW[:, tap : tap + length], weight_WJ[:, tap]
        y_BTW.addcmul_(part_BTW, weight_W if same is None else weight_W * same[tap])
    return y_BTW


class _Convolved(torch.autograd.Function):
    """`_convolved`, with gradients that need no copies of shifted inputs."""

    @staticmethod
    def forward(ctx: Any, x_BTW: torch.Tensor, weight_WJ: torch.Tensor, same: torch.Tensor | None):
        ctx.save_for_backward(x_BTW, weight_WJ, same)
        return _convolved(x_BTW, weight_WJ, same)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_BTW,), (x_BTW, weight_WJ, same) = grad_outputs, ctx.saved_tensors
        taps, length = weight_WJ.shape[1], grad_BTW.shape[1]
        grad_x, grad_weight = torch.zeros_like(x_BTW), torch.empty_like(weight_WJ)
        for tap in range(taps):
            part_BTW = grad_BTW if same is None or tap == taps - 1 else grad_BTW * same[tap]
            grad_x[:, tap : tap + length].addcmul_(part_BTW, weight_WJ[:, tap])
            grad_weight[:, tap] = (part_BTW * x_BTW[:, tap : tap + length]).sum((0, 1))
        return grad_x, grad_weight, None


class Decay(Viewed):
    """How fast each head's state decays."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))

    def forward(self, a_BTH: torch.Tensor) -> torch.Tensor:
        """The logarithm of each token's decay, in fp32 or wider."""
        weights = self.view.read(self)
        wide = torch.promote_types(a_BTH.dtype, torch.float32)
        rate_H, bias_H = weights["log_rate"].to(wide).exp(), weights["bias"].to(wide)
        return -rate_H * F.softplus(a_BTH.to(wide) + bias_H)


class GatedDelta(nn.Module):
    """The gated delta rule in the place of attention (Qwen3-Next: Qwen Team, 2025).

    Slots: `entry`, applied to the projections' input, and `pieces`. Strategies whose ranks share heads or tokens fill
    them.
    """

    entry: Entry | None = None
    pieces: Pieces = Pieces()

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        kind = spec.layer(layer).mixer
        assert isinstance(kind, GatedDeltaSpec)
        self.kind, width = kind, sum(kind.segments)
        if kind.by_key_head:
            self.w_qkvz = Linear(spec.hidden, width + kind.values, bias=False)
            self.w_ba = Linear(spec.hidden, 2 * kind.heads, bias=False)
        else:
            self.w_qkv = Linear(spec.hidden, width, bias=False)
            self.w_z = Linear(spec.hidden, kind.values, bias=False)
            self.w_b = Linear(spec.hidden, kind.heads, bias=False)
            self.w_a = Linear(spec.hidden, kind.heads, bias=False)
        self.convolution = Convolution(width, kind.kernel)
        self.decay = Decay(kind.heads)
        self.norm = RMSNorm(kind.value_dim, eps=spec.norm_eps)
        self.w_out = Linear(kind.values, spec.hidden, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, rope: RopeTables | None = None, mask: Mask = None, cache: Any = None
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]; `mask`: the row's documents, or None. `cache`: a `StateCache`."""
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        qkv_BTW, z_BTHV, b_BTH, a_BTH = self._projected(x_BTD)
        g_BTH, beta_BTH = self.decay(a_BTH), b_BTH.sigmoid()
        if cache is None:
            y_BTHV = self._mixed(qkv_BTW, g_BTH, beta_BTH, mask)
        else:
            y_BTHV = self._continued(qkv_BTW, g_BTH, beta_BTH, cache)
        wide = torch.promote_types(z_BTHV.dtype, torch.float32)
        y_BTHV = self.norm(y_BTHV.to(z_BTHV.dtype)) * F.silu(z_BTHV.to(wide))
        return self.w_out(y_BTHV.to(z_BTHV.dtype).flatten(-2))

    def _projected(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values before the convolution [B, T, W], output gates [B, T, H, V], and the numbers [B, T,
        H] that give each token's share and decay. H is of this rank."""
        kind, shares = self.kind, self.kind.heads // self.kind.key_heads
        if not kind.by_key_head:
            z_BTHV = self.w_z(x_BTD).unflatten(-1, (-1, kind.value_dim))
            return self.w_qkv(x_BTD), z_BTHV, self.w_b(x_BTD), self.w_a(x_BTD)
        widths = kind.key_dim, kind.key_dim, shares * kind.value_dim, shares * kind.value_dim
        q, k, v, z = self.w_qkvz(x_BTD).unflatten(-1, (-1, sum(widths))).split(widths, -1)
        b, a = self.w_ba(x_BTD).unflatten(-1, (-1, 2 * shares)).split(shares, -1)
        qkv_BTW = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
        return qkv_BTW, z.unflatten(-1, (shares, -1)).flatten(-3, -2), b.flatten(-2), a.flatten(-2)

    def _mixed(self, qkv_BTW: torch.Tensor, g_BTH: torch.Tensor, beta_BTH: torch.Tensor, mask: Mask) -> torch.Tensor:
        """The rule's outputs [B, T, H, V] for whole sequences."""
        before, pieces = self.kind.kernel - 1, self.pieces
        qkv_BTW, g_BTH, beta_BTH = (pieces.apart(x) for x in (qkv_BTW, g_BTH, beta_BTH))
        documents = pieces.documents(mask, before)
        padded = torch.cat((pieces.ahead(qkv_BTW, before), qkv_BTW), 1)
        heads = self._heads(self.convolution(padded, documents), g_BTH, beta_BTH)
        return pieces.together(pieces.rule(heads, None if documents is None else documents[:, before - 1 :]))

    def _heads(self, qkv_BTW: torch.Tensor, g_BTH: torch.Tensor, beta_BTH: torch.Tensor) -> Heads:
        """What the tokens contribute, from the convolution's result."""
        kind, wide = self.kind, g_BTH.dtype
        keys = g_BTH.shape[-1] * kind.key_heads // kind.heads * kind.key_dim  # of this rank
        q, k, v = F.silu(qkv_BTW).to(wide).split((keys, keys, qkv_BTW.shape[-1] - 2 * keys), -1)
        q, k = (of_length_one(x.unflatten(-1, (-1, kind.key_dim))) for x in (q, k))
        v_BTHV = v.unflatten(-1, (-1, kind.value_dim))
        return Heads(q * kind.key_dim**-0.5, k, v_BTHV, g_BTH, beta_BTH.to(wide))

    def _continued(
        self, qkv_1NW: torch.Tensor, g_1NH: torch.Tensor, beta_1NH: torch.Tensor, cache: StateCache
    ) -> torch.Tensor:
        """The rule's outputs [1, N, H, V] for the new tokens of several sequences."""
        kind, step = self.kind, cache.step
        sizes = g_1NH.shape[-1], kind.key_dim, kind.value_dim
        cache.make_room((kind.kernel - 1, qkv_1NW.shape[-1]), qkv_1NW.dtype, sizes, g_1NH.dtype)
        y_NHV = g_1NH.new_zeros(qkv_1NW.shape[1], sizes[0], sizes[2])
        new = [(slice(0, step.singles), 1, cache.of_singles())] if step.singles else []
        new += [(slice(part.begin, part.end), part.stop - part.start, cache.of_part(part)) for part in step.parts]
        for tokens, length, kept in new:
            qkv_PTW, g_PTH, beta_PTH = (x[0, tokens].unflatten(0, (-1, length)) for x in (qkv_1NW, g_1NH, beta_1NH))
            padded = torch.cat((kept.inputs, qkv_PTW), 1)
            heads = self._heads(self.convolution(padded, None), g_PTH, beta_PTH)
            if length == 1:
                q, k, v, g, beta = (x[:, 0] for x in heads)
                y_PHV, state = one_token(q, k, v, g.exp(), beta).apply(kept.state)
            else:
                y_PTHV, state = gated_delta_rule(heads, None, kept.state)
                y_PHV = y_PTHV.flatten(0, 1)
            y_NHV[tokens] = y_PHV
            cache.store(kept, padded[:, length:], state)
        return y_NHV[None]

    def extra_repr(self) -> str:
        """The contents of the slots."""
        entry = "" if self.entry is None else f"entry: {self.entry}, "
        return f"{entry}over {self.pieces}"
