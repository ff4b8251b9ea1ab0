"""Attention: grouped heads, rotary embedding, packed documents, KV cache.

Shapes: B batch, T sequence, S keys (cached and new), N = B * T tokens, D hidden, H heads, G key and value heads, K
head_dim.
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.devices import accelerator_is_here, on_cpu
from meshwright.models.cache import LayerCache
from meshwright.models.cpu_kernels import attends, causal_attention
from meshwright.models.linear import Linear
from meshwright.models.masks import Documents, Mask
from meshwright.models.norm import build_norm
from meshwright.models.rope import RopeTables, apply_rope
from meshwright.models.sinks import Sinks, sink_attention
from meshwright.models.slots import Entry
from meshwright.spec.layers import AttentionSpec
from meshwright.spec.model import ModelSpec

varlen_attn: Any = None
"""The flash kernel for packed documents; None without a GPU, or if torch was built without it."""
if accelerator_is_here():  # skipped on CPUs: the import loads torch's compiler, 1.5 s
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn


VARLEN = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
"""Options that this torch's kernel for packed documents accepts."""


class Core:
    """Computes the heads' outputs from queries, keys and values; here on one device, by the kernel that applies."""

    def __call__(self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Softmax attention [B, H, T, K] of queries to the keys that `mask` allows."""
        if isinstance(mask, Documents):
            return attend_documents(q_BHTK, k_BGSK, v_BGSK, mask)
        return scaled_dot_product(q_BHTK, k_BGSK, v_BGSK, mask)

    def with_sinks(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask, sinks_H: torch.Tensor
    ) -> torch.Tensor:
        """The same where each head has a sink with a score."""
        return sink_attention(q_BHTK, k_BGSK, v_BGSK, mask, sinks_H)

    def __repr__(self) -> str:
        return "sdpa"


class SinkCore(Core):
    """A core with the sinks of a layer."""

    def __init__(self, core: Core, sinks_H: torch.Tensor) -> None:
        self.core, self.sinks_H = core, sinks_H

    def __call__(self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask) -> torch.Tensor:
        """See `Core`."""
        return self.core.with_sinks(q_BHTK, k_BGSK, v_BGSK, mask, self.sinks_H)


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query (Ainslie et al., 2023).

    Slots: `entry`, applied to the projections' input, and `core`. Strategies whose ranks share heads or tokens fill
    them.
    """

    entry: Entry | None = None
    core: Core = Core()

    window: int | None
    """Keys that a query sees at most; the masks of the layer have it too."""

    def __init__(self, spec: ModelSpec, layer: int = 0):
        super().__init__()
        kind = spec.layer(layer).mixer
        assert isinstance(kind, AttentionSpec)
        heads, kv_heads = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
        self.head_dim, self.scale, self.window = kind.head_dim, kind.scale, kind.window
        self.rotated = 0 if kind.rope is None else kind.rotated
        self.norms_all_heads = kind.qk_norm == "all"
        self.gated = kind.gated
        self.wq = Linear(spec.hidden, (1 + kind.gated) * heads, bias=kind.qkv_bias)
        self.wk = Linear(spec.hidden, kv_heads, bias=kind.qkv_bias)
        self.wv = Linear(spec.hidden, kv_heads, bias=kind.qkv_bias)
        self.wo = Linear(heads, spec.hidden, bias=kind.output_bias)
        self.sinks = Sinks(kind.heads) if kind.sinks else None
        self.q_norm, self.k_norm = (self._qk_norm(spec, kind, width) for width in (heads, kv_heads))

    @staticmethod
    def _qk_norm(spec: ModelSpec, kind: AttentionSpec, width: int) -> nn.Module | None:
        match kind.qk_norm:
            case "none":
                return None
            case "heads":
                return build_norm(spec, kind.head_dim)
            case "all":
                return build_norm(spec, width)
            case _:
                assert_never(kind.qk_norm)

    def forward(
        self, x_BTD: torch.Tensor, rope: RopeTables | None = None, mask: Mask = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]; `mask` is from `attention_mask` (None: causal), or the row's documents."""
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        # The number of heads is read from the projections, so the same code serves a rank that holds only a part of
        # them.
        q_BTC, gates_BTC = self.wq(x_BTD), None
        if self.gated:  # of each head: its query, then its gate
            q_BTC, gates_BTC = (x.flatten(-2) for x in q_BTC.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1))
        q_BTHK = self._heads(q_BTC, self.q_norm)
        k_BTGK = self._heads(self.wk(x_BTD), self.k_norm)
        v_BTGK = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        if rope is not None:
            q_BTHK, k_BTGK = apply_rope(q_BTHK, rope), apply_rope(k_BTGK, rope)
        # Kernels divide scores by the root of head_dim.
        q_BTHK = q_BTHK if self.scale == 1 else q_BTHK * self.scale
        y_BTC = self.attend((q_BTHK, k_BTGK, v_BTGK), mask, cache).flatten(-2)
        return self.wo(y_BTC if gates_BTC is None else y_BTC * gates_BTC.sigmoid())

    def _heads(self, x_BTC: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """Queries or keys [B, T, H, K], normed."""
        if norm is None:
            return x_BTC.unflatten(-1, (-1, self.head_dim))
        if self.norms_all_heads:
            return norm(x_BTC).unflatten(-1, (-1, self.head_dim))
        return norm(x_BTC.unflatten(-1, (-1, self.head_dim)))

    @property
    def plain(self) -> bool:
        """Whether queries and keys are normed by head if at all, rotated in whole if at all, scores neither scaled nor
        shared with a sink, and outputs not gated."""
        whole = not self.gated and self.rotated in (0, self.head_dim)
        return self.sinks is None and not self.norms_all_heads and self.scale == 1 and whole

    def attend(self, qkv_BTHK: Sequence[torch.Tensor], mask: Mask, cache: LayerCache | None) -> torch.Tensor:
        """The heads' outputs [B, T, H, K] from queries, keys and values, by the core."""
        q_BHTK, k_BGSK, v_BGSK = (tensor.transpose(1, 2) for tensor in qkv_BTHK)
        sinks_H = None if self.sinks is None else self.sinks()
        core = self.core if sinks_H is None else SinkCore(self.core, sinks_H)
        if cache is None:
            y_BHTK = core(q_BHTK, k_BGSK, v_BGSK, mask)
        else:
            y_BHTK = cache.attend(core, q_BHTK, k_BGSK, v_BGSK, sinks_H)
        return y_BHTK.transpose(1, 2)

    def extra_repr(self) -> str:
        """The contents of the slots."""
        entry = "" if self.entry is None else f"entry: {self.entry}, "
        return f"{entry}core: {self.core}"


def scaled_dot_product(
    q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention [B, H, T, K] by the fastest kernel for device and dtype; `mask` is from `attention_mask`."""
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    if repeats > 1 and not on_cpu(q_BHTK) and (mask is not None or q_BHTK.dtype in (torch.float32, torch.float64)):
        # Only CUDA's flash kernel shares keys between heads, and it takes neither fp32 nor masks; without
        # this SDPA would fall back to its slow path, which holds all T x S scores.
        k_BGSK, v_BGSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
        repeats = 1
    is_causal = mask is None and q_BHTK.shape[2] > 1
    if is_causal and attends(q_BHTK):
        return causal_attention(q_BHTK, k_BGSK, v_BGSK)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=is_causal, enable_gqa=repeats > 1
    )


def attend_documents(
    q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Causal attention [B, H, T, K] within documents.

    Uses the flash kernel for packed documents on a GPU where it applies. On a CPU computes span by span, which wastes
    few scores on masked keys. Otherwise uses a mask: in fp32 on a GPU, and in compiled code for CPUs, where every
    arrangement of spans would be compiled separately.
    """
    if serves_varlen(q_BHTK):
        return attend_varlen(q_BHTK, k_BGTK, v_BGTK, documents)
    if q_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
        return scaled_dot_product(q_BHTK, k_BGTK, v_BGTK, documents.mask())
    lengths, masks = zip(*documents.spans, strict=True)
    spans = zip(*(_flat(x).split(lengths, 2) for x in (q_BHTK, k_BGTK, v_BGTK)), masks, strict=True)
    y_1HNK = torch.cat([scaled_dot_product(*span) for span in spans], 2)
    return y_1HNK[0].unflatten(1, (len(q_BHTK), -1)).transpose(0, 1)


def serves_varlen(q_BHTK: torch.Tensor) -> bool:
    """Whether the flash kernel for packed documents can be used: half precision on a GPU."""
    return has_varlen(q_BHTK.device, q_BHTK.dtype)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether that kernel can be used for a device and a dtype."""
    return not on_cpu(device) and dtype in (torch.bfloat16, torch.float16) and "window_size" in VARLEN


def attend_varlen(
    q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Causal attention [B, H, T, K] within documents by the flash kernel for packed documents."""
    q_NHK, k_NGK, v_NGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BGTK, v_BGTK))
    repeats = q_NHK.shape[1] // k_NGK.shape[1]
    options: dict[str, Any] = {
        # No document is longer than a row; only the GPU knows the longest length.
        **dict.fromkeys(("max_q", "max_k"), q_BHTK.shape[2]),
        "window_size": (-1 if documents.window is None else documents.window - 1, 0),
    }
    if repeats > 1 and "enable_gqa" in VARLEN:
        options["enable_gqa"] = True
    elif repeats > 1:
        k_NGK, v_NGK = k_NGK.repeat_interleave(repeats, 1), v_NGK.repeat_interleave(repeats, 1)
    y_NHK = varlen_attn(q_NHK, k_NGK, v_NGK, documents.offsets, documents.offsets, **options)
    return y_NHK.unflatten(0, (len(q_BHTK), -1)).transpose(1, 2)


def _flat(x_BHTK: torch.Tensor) -> torch.Tensor:
    """[1, H, N, K]: all rows concatenated, without a copy if x is a transposed [B, T, H, K]."""
    return x_BHTK.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
