"""Attention kernels by name (`training.attention`), and which of them a device supports.

| name          | implementation                                 | packed documents and windows              |
|---------------|------------------------------------------------|-------------------------------------------|
| flash         | torch's SDPA, flash kernel                     | on a CPU under a mask; on a GPU refused   |
| mem_efficient | torch's SDPA, memory-efficient kernel          | under a mask                              |
| cudnn         | torch's SDPA, cuDNN                            | under a mask                              |
| math          | torch's SDPA as matrix products, all scores    | under a mask                              |
| flex          | FlexAttention, compiled; blocks of a mask      | fully masked blocks are skipped           |
| varlen        | flash kernel for packed documents              | concatenated documents, and windows       |

Shapes: B batch, T sequence, S keys, H heads, G key and value heads, K head_dim.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, assert_never, get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.models.attention import Attention, Core, Mask, attend_varlen, has_varlen
from meshwright.models.decoder import Decoder
from meshwright.models.masks import Documents, attention_mask
from meshwright.spec.errors import UserError
from meshwright.spec.training import AttentionName

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

RECORDED = {"Flash": "flash", "Efficient": "mem_efficient", "Cudnn": "cudnn"}
"""Words in autograd's names of kernels."""

PROBED = 32
"""Tokens of the attention that tests whether a device has a kernel."""


class NamedCore(Core):
    """Attention by one kernel; it fails where the kernel does not apply."""

    def __init__(self, name: AttentionName, window: int | None = None) -> None:
        """`window`: the layer's sliding window."""
        self.name: AttentionName = name
        self.window = window

    def __call__(self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask) -> torch.Tensor:
        """See `Core`."""
        match self.name:
            case "flex":
                return _flex(q_BHTK, k_BGSK, v_BGSK, mask)
            case "varlen":
                return attend_varlen(q_BHTK, k_BGSK, v_BGSK, _documents(q_BHTK, mask, self.window))
            case "flash" | "mem_efficient" | "math" | "cudnn":
                return self._by_sdpa(q_BHTK, k_BGSK, v_BGSK, mask)
            case "auto":
                raise AssertionError("auto leaves the choice to each layer")
            case _:
                assert_never(self.name)

    def _by_sdpa(self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask) -> torch.Tensor:
        seen = mask.mask() if isinstance(mask, Documents) else mask
        repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
        if repeats > 1:  # not every kernel shares keys between heads
            k_BGSK, v_BGSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
        causal = seen is None and q_BHTK.shape[2] > 1
        with sdpa_kernel(SDPA[self.name]):
            return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=seen, is_causal=causal)

    def __repr__(self) -> str:
        return self.name


class AttentionNeeds(NamedTuple):
    """The requirements of a run for its attention."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    documents: bool
    """Whether rows hold documents that are kept apart."""
    window: int | None

    def __str__(self) -> str:
        rows = ", documents kept apart" if self.documents else ""
        window = "" if self.window is None else f", a window of {self.window}"
        return f"{self.device.type}, {str(self.dtype).removeprefix('torch.')}, heads of {self.head_dim}{rows}{window}"

    def mask(self) -> Mask:
        """A mask of its kind, for `PROBED` tokens."""
        if self.documents:
            return Documents(torch.arange(PROBED, device=self.device)[None] // 5, window=self.window)
        window = None if self.window is None else min(self.window, PROBED // 2)
        return attention_mask(PROBED, PROBED, window=window, device=self.device)

    def heads(self) -> torch.Tensor:
        """Queries, keys or values of `PROBED` tokens: zeros."""
        return torch.zeros(1, 2, PROBED, self.head_dim, device=self.device, dtype=self.dtype, requires_grad=True)


def use_kernel(model: Decoder, name: AttentionName) -> None:
    """Make every attention layer of `model` use a kernel."""
    if name == "auto":
        return
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if model.layers and not layers:
        raise UserError(f"training.attention={name}: the model does not use meshwright.models.Attention; use auto")
    if any(layer.sinks is not None for layer in layers):
        raise UserError(
            f"training.attention={name}: no such kernel has the attention sinks of {model.spec.family}; use auto"
        )
    for layer in layers:
        layer.core = NamedCore(name, layer.window)


def check_kernel(name: AttentionName, request: AttentionNeeds) -> None:
    """Raise `UserError` if the device cannot train with a kernel, which is tested by trying."""
    if name == "auto" or serves(name, request):
        return
    works = [other for other in get_args(AttentionName) if other not in ("auto", name) and serves(other, request)]
    raise UserError(
        f"training.attention={name}: it does not train here ({request}); use {' or '.join((*works, 'auto'))}"
    )


@functools.cache
def serves(name: AttentionName, request: AttentionNeeds) -> bool:
    """Whether a forward and a backward pass of a few tokens work."""
    if name == "varlen" and not has_varlen(request.device, request.dtype):
        return False
    try:
        NamedCore(name, request.window)(
            request.heads(), request.heads(), request.heads(), request.mask()
        ).sum().backward()
    except (RuntimeError, ValueError):  # torch's errors for an unsuitable kernel; NotImplementedError is one
        return False
    return True


def describe_kernel(name: AttentionName, request: AttentionNeeds) -> str:
    """The kernel of a run, for its banner."""
    if name != "auto":
        return name
    if request.documents and has_varlen(request.device, request.dtype):
        return "varlen, chosen by auto"
    mask = request.mask()
    mask = mask.mask() if isinstance(mask, Documents) else mask
    heads = request.heads()
    node: Any = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, is_causal=mask is None).grad_fn
    while node is not None:  # nodes that autograd recorded: a kernel's backward pass, or products'
        if used := next((kernel for word, kernel in RECORDED.items() if word in node.name()), None):
            return f"{used}, chosen by auto"
        node = next((function for function, _ in node.next_functions if function is not None), None)
    return "math, chosen by auto"


def _documents(q_BHTK: torch.Tensor, mask: Mask, window: int | None) -> Documents:
    """The mask as documents; without documents, every row is one."""
    if isinstance(mask, Documents):
        return mask
    rows_BT = torch.zeros(len(q_BHTK), q_BHTK.shape[2], dtype=torch.int64, device=q_BHTK.device)
    return Documents(rows_BT, window=window)


def _flex(q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask  # loads torch's compiler

    batch, device = len(q_BHTK), q_BHTK.device
    sees = _sees(mask)
    rows = batch if isinstance(mask, Documents) else None
    blocks = create_block_mask(sees, rows, None, q_BHTK.shape[2], k_BGSK.shape[2], device=str(device))
    return _flex_kernel(device.type)(
        q_BHTK, k_BGSK, v_BGSK, block_mask=blocks, enable_gqa=q_BHTK.shape[1] != k_BGSK.shape[1]
    )


@functools.cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device_type != "cpu" else flex_attention


def _sees(mask: Mask) -> Callable[..., torch.Tensor]:
    """Whether a query sees a key, with FlexAttention's signature."""
    if mask is None:
        return lambda b, h, query, key: query >= key
    if isinstance(mask, torch.Tensor):
        return lambda b, h, query, key: mask[query, key]
    documents_BT, window = mask.documents_BT, mask.window

    def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (query >= key) & (documents_BT[b, query] == documents_BT[b, key])
        return seen if window is None else seen & (query - key < window)

    return sees
