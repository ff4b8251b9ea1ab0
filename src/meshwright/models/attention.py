"""The one place that computes attention: grouped heads, rotation, sliding window and the cache of generation.

Shapes: B batch, T sequence, S keys (cached and new), D hidden, H heads, G key and value heads, K head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.cpu_kernels import Linear, causal_attention, serves_attention
from meshwright.models.norm import build_norm
from meshwright.models.rope import RopeTables, apply_rope
from meshwright.spec.model import ModelSpec


class LayerCache:
    """One layer's keys and values of the tokens seen so far, [B, G, length, K] of room for `capacity`."""

    def __init__(self, keys_BGSK: torch.Tensor, values_BGSK: torch.Tensor):
        self.keys_BGSK = keys_BGSK
        self.values_BGSK = values_BGSK
        self.length = 0

    def append(self, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values and return all of them, views of [B, G, S, K]."""
        start, self.length = self.length, self.length + k_BGTK.shape[2]
        self.keys_BGSK[:, :, start : self.length] = k_BGTK
        self.values_BGSK[:, :, start : self.length] = v_BGTK
        return self.keys_BGSK[:, :, : self.length], self.values_BGSK[:, :, : self.length]


def attention_mask(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None,
    padding_B: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Which keys each of the last `num_queries` positions sees: bool [T, S], or [B, 1, T, S] where prompts
    are padded.

    None where SDPA's own causal rule says the same, which keeps its fast path.

    Args:
        window: keys a query sees at most, itself included.
        padding_B: number of padding tokens on the left of each row, or None.
    """
    if window is not None and num_keys <= window:
        window = None
    if window is None and padding_B is None and num_queries in (1, num_keys):
        return None
    keys_S = torch.arange(num_keys, device=device)
    queries_T1 = keys_S[num_keys - num_queries :, None]
    mask = keys_S <= queries_T1
    if window is not None:
        mask = mask & (keys_S > queries_T1 - window)
    if padding_B is not None:
        # A padding token sees itself, because a row that sees nothing is NaN; nobody sees it.
        mask = (mask & (keys_S >= padding_B[:, None, None])) | (keys_S == queries_T1)
        mask = mask[:, None]
    return mask


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query (Ainslie et al., 2023)."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.grouped = spec.num_kv_heads < spec.num_heads
        self.wq = Linear(spec.hidden, heads, bias=spec.qkv_bias)
        self.wk = Linear(spec.hidden, kv_heads, bias=spec.qkv_bias)
        self.wv = Linear(spec.hidden, kv_heads, bias=spec.qkv_bias)
        self.wo = Linear(heads, spec.hidden, bias=spec.output_bias)
        self.q_norm = build_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = build_norm(spec, spec.head_dim) if spec.qk_norm else None

    def forward(
        self,
        x_BTD: torch.Tensor,
        rope: RopeTables | None = None,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]; `mask` as `attention_mask` makes it (None: causal)."""
        # The number of heads is read off the projections, so a rank that holds a share of them needs no other
        # code.
        q_BTHK = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if rope is not None:
            q_BTHK, k_BTGK = apply_rope(q_BTHK, rope), apply_rope(k_BTGK, rope)
        q_BHTK, k_BGSK, v_BGSK = (tensor.transpose(1, 2) for tensor in (q_BTHK, k_BTGK, v_BTGK))
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
        y_BHTK = self._attend(q_BHTK, k_BGSK, v_BGSK, mask)
        return self.wo(y_BHTK.transpose(1, 2).flatten(-2))

    def _attend(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        grouped = self.grouped
        if grouped and q_BHTK.is_cuda and (mask is not None or q_BHTK.dtype in (torch.float32, torch.float64)):
            # Only CUDA's flash kernel shares keys between heads, and it takes neither fp32 nor masks; without
            # this SDPA would fall back to its slow path, which holds all T x S scores.
            repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
            k_BGSK, v_BGSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
            grouped = False
        is_causal = mask is None and q_BHTK.shape[2] > 1
        if is_causal and serves_attention(q_BHTK):
            return causal_attention(q_BHTK, k_BGSK, v_BGSK)
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
        )
