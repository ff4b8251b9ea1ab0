"""Replacements for torch kernels that are slow on CPUs; delete each one when torch's is faster.

- `linear`: torch gives fp32 matrix products to MKL, which does not use AVX-512 on AMD. oneDNN, in the same build of
  torch, is twice as fast there; on Intel's MKL is faster, in weight gradients by a third. Both compute in full fp32.
- `causal_attention`: the backward pass of torch's bf16 flash kernel takes twice as long as the few batched matrix
  products that it consists of; with short rows, so does its forward pass. Without bf16 units, torch's is faster.

Where neither is faster everywhere, `models/kernel_choice.py` measures which a run takes.

- `gelu_tanh`: torch computes every tanh twice, once in each pass. Ours computes it once and saves the derivative for
  the backward pass instead of the input.

Shapes: M rows, D in, N out; B batch, H heads, G key and value heads, R = H / G query heads that share one, T sequence,
K head_dim; C pairs (batch, G) computed together, Q queries of a block, q = R Q their rows, S keys that they see.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import pi
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.torch_internals import FLASH_CPU, ONEDNN_LINEAR, linear_by_onednn, softmax_backward

ONEDNN = torch.backends.mkldnn.is_available()
"""Whether this build of torch has oneDNN."""

MATMULS = () if ONEDNN_LINEAR is None else (ONEDNN_LINEAR.default,)
"""Operations that are matrix products, besides torch's own names for them."""

SCORES = 2**20
"""Attention scores computed together, at most (but at least one head's), so that they stay in the cache."""

SHORT = 4
"""Rows of attention are short up to this many times a head's width."""

GELUS = 2**18
"""Values that `gelu_tanh` widens to fp32 at a time: few enough for the cache, many enough for every thread."""


ProductsName = Literal["onednn", "mkl"]
AttentionKernel = Literal["blocks", "torch"]
PRODUCTS, ATTENTION = get_args(ProductsName), get_args(AttentionKernel)


@dataclass(frozen=True)
class Kernels:
    """The kernels in use: of products in fp32, and of causal attention in bf16."""

    products: ProductsName = "onednn"
    attention: AttentionKernel = "blocks"

    def __post_init__(self) -> None:
        if self.products not in PRODUCTS or self.attention not in ATTENTION:
            raise ValueError(f"no such kernels: {self}")


FIXED = Kernels()
CHOSEN: ContextVar[Kernels] = ContextVar("CHOSEN", default=FIXED)
"""A slot: the kernels in use."""


def linear(input: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, by oneDNN for fp32 on a CPU: [..., D] to [..., N]."""
    if not _by_onednn(input, weight_ND):
        return F.linear(input, weight_ND, bias_N)
    return _Linear.apply(input, weight_ND, bias_N)


def matmul(a_MD: torch.Tensor, b_DN: torch.Tensor, room_MN: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b`, without autograd. `room` is memory for the result."""
    return _onednn(a_MD, b_DN.t()) if _by_onednn(a_MD, b_DN) else torch.mm(a_MD, b_DN, out=room_MN)


def serves_training(x: torch.Tensor) -> bool:
    """Whether `causal_attention` and `gelu_tanh` apply: a plain CPU tensor in bf16 that needs a backward pass, in eager
    mode."""
    trained = torch.is_grad_enabled() and x.requires_grad
    return x.dtype == torch.bfloat16 and trained and _is_plain(x)


def attends(q_BHTK: torch.Tensor) -> bool:
    """Whether `causal_attention` applies, and is chosen."""
    return serves_training(q_BHTK) and CHOSEN.get().attention == "blocks"  # compilers cannot read the slot


def causal_attention(q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> torch.Tensor:
    """`F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)` with a faster backward pass."""
    return _CausalAttention.apply(q_BHTK, k_BGTK, v_BGTK)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """`F.gelu(x, approximate="tanh")` with a faster backward pass, whose derivative is rounded to bf16."""
    return _GeluTanh.apply(x)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its numbers on the CPU in eager mode: not a DTensor, a fake one or one being compiled."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _by_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    usable = a.dtype == torch.float32 and ONEDNN and _is_plain(a) and _is_plain(b)
    return usable and CHOSEN.get().products == "onednn"


def _onednn(a: torch.Tensor, b_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T + bias`, [..., D] to [..., N]. `b` or its transpose must be contiguous: oneDNN has no fast kernel for
    strided rows."""
    assert b_ND.is_contiguous() or b_ND.t().is_contiguous()
    return linear_by_onednn(a, b_ND, bias_N)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_ND, bias_N):
        ctx.save_for_backward(x, weight_ND)
        return _onednn(x, weight_ND, bias_N)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        x, weight_ND = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight_ND.t()) if need_x else None,
            _onednn(grad_MN.t(), x.flatten(0, -2).contiguous().t()) if need_weight else None,
            grad_MN.sum(0) if need_bias else None,
        )


class _CausalAttention(torch.autograd.Function):
    """Forward by torch's flash kernel, backward as in FlashAttention (Dao et al., 2022), block by block.

    With short rows the same few products are faster in the forward pass too. Their probabilities are then saved for the
    backward pass: they take no more memory than q, k, v and y.
    """

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK):
        ctx.short = q_BHTK.shape[-2] <= SHORT * q_BHTK.shape[-1]
        if ctx.short:
            chunks = [_attention(*chunk) for chunk in _chunks(k_BGTK.shape[1], q_BHTK, k_BGTK, v_BGTK)]
            y_BHTK, kept = torch.cat([y for y, _ in chunks]).view(q_BHTK.shape), [p for _, ps in chunks for p in ps]
        else:
            repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
            keys_values = k_BGTK, v_BGTK
            if repeats > 1:
                keys_values = (tensor.repeat_interleave(repeats, 1) for tensor in keys_values)
            y_BHTK, *kept = FLASH_CPU(q_BHTK, *keys_values, 0.0, True)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, *kept)
        return y_BHTK

    @staticmethod
    def backward(ctx, *grad_outputs):
        q_BHTK, k_BGTK, v_BGTK, *kept = ctx.saved_tensors
        chunks = _chunks(k_BGTK.shape[1], q_BHTK, k_BGTK, v_BGTK, *grad_outputs, *(() if ctx.short else kept))
        blocks, grads = reversed(kept), []
        for q_CRTK, k_C1TK, v_C1TK, grad_CRTK, *logsumexp_CRT in reversed(chunks):
            again = functools.partial(_probabilities, q_CRTK, k_C1TK, *logsumexp_CRT)
            probabilities = (lambda *_: next(blocks)) if ctx.short else again
            grads.append(_attention_backward(q_CRTK, k_C1TK, v_C1TK, grad_CRTK, probabilities))
        grads = zip(*reversed(grads), strict=True)
        shapes = q_BHTK.shape, k_BGTK.shape, v_BGTK.shape
        return tuple(torch.cat(grad).view(shape) for grad, shape in zip(grads, shapes, strict=True))


def _chunks(groups: int, *tensors_BHT: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The tensors as [C, R, T, ...], in groups of pairs that are computed together; R is 1 for keys and values."""
    _, heads, length, *_ = tensors_BHT[0].shape
    together = max(1, SCORES // (_queries(length) * length * (heads // groups)))

    def split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, heads, *rest = tensor.shape
        return tensor.reshape(batch * groups, heads // groups, *rest).split(together)

    return list(zip(*map(split, tensors_BHT), strict=True))


def _queries(length: int) -> int:
    """How many queries are computed together."""
    return min(512, max(128, length // 4))


def _query_blocks(length: int) -> list[tuple[int, int]]:
    queries = _queries(length)
    return [(start, min(start + queries, length)) for start in range(0, length, queries)]


def _attention(
    q_CRTK: torch.Tensor, k_C1TK: torch.Tensor, v_C1TK: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the probabilities [C, R Q, S] of each block of queries; scores and softmax in fp32."""
    pairs, repeats, length, width = q_CRTK.shape
    y_CRTK, kept = torch.empty_like(q_CRTK, memory_format=torch.contiguous_format), []
    k_CTK, v_CTK = k_C1TK.squeeze(1).float(), v_C1TK.squeeze(1)
    for start, stop in _query_blocks(length):
        q_CqK = q_CRTK[:, :, start:stop].reshape(pairs, -1, width).float()
        future_qS = torch.full((stop - start, stop), -torch.inf).triu_(start + 1).repeat(repeats, 1)
        scores_CqS = torch.baddbmm(future_qS, q_CqK, k_CTK[:, :stop].mT, alpha=width**-0.5)
        p_CqS = torch.softmax(scores_CqS, -1, out=scores_CqS).to(q_CRTK.dtype)
        y_CRTK[:, :, start:stop] = torch.bmm(p_CqS, v_CTK[:, :stop]).view(pairs, repeats, -1, width)
        kept.append(p_CqS)
    return y_CRTK, kept


def _probabilities(
    q_CRTK: torch.Tensor, k_C1TK: torch.Tensor, logsumexp_CRT: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """The scores of a block of queries [C, R Q, S], recomputed."""
    pairs, repeats, _, width = q_CRTK.shape
    q_CqK, k_CSK = q_CRTK[:, :, start:stop].reshape(pairs, -1, width), k_C1TK[:, 0, :stop]
    # An approximate logsumexp is subtracted from the scores before they are rounded to bf16. Large probabilities, whose
    # logarithms are small, are then exact, and softmax corrects for the rounding of the logsumexp itself.
    minus_Cq1 = -logsumexp_CRT[:, :, start:stop].reshape(pairs, -1, 1).to(q_CqK.dtype)
    p_CqS = torch.baddbmm(minus_Cq1, q_CqK, k_CSK.mT, alpha=width**-0.5)
    future_QQ = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1)
    p_CqS.view(pairs, repeats, stop - start, stop)[..., start:].masked_fill_(future_QQ, -torch.inf)
    return torch.softmax(p_CqS, -1, out=p_CqS)


def _attention_backward(
    q_CRTK: torch.Tensor,
    k_C1TK: torch.Tensor,
    v_C1TK: torch.Tensor,
    grad_CRTK: torch.Tensor,
    probabilities: Callable[[int, int], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; the latter two are summed in fp32 over blocks of queries.

    The last block comes first: only it sees all keys, and the others are added to its result.
    """
    pairs, repeats, length, width = q_CRTK.shape
    k_CTK, v_CTK = k_C1TK.squeeze(1), v_C1TK.squeeze(1)
    grad_q_CRTK = torch.empty_like(q_CRTK, memory_format=torch.contiguous_format)
    grad_k_CTK = grad_v_CTK = torch.empty(0)
    for start, stop in reversed(_query_blocks(length)):
        q_CqK, dy_CqK = (x[:, :, start:stop].reshape(pairs, -1, width) for x in (q_CRTK, grad_CRTK))
        p_CqS = probabilities(start, stop)
        grad_v_CSK = torch.bmm(p_CqS.mT, dy_CqK).float()  # cast before the addition: adding across dtypes is slow
        dp_CqS = torch.bmm(dy_CqK, v_CTK[:, :stop].mT)
        ds_CqS = softmax_backward(dp_CqS, p_CqS)
        grad_q_CqK = torch.bmm(ds_CqS, k_CTK[:, :stop]).mul_(width**-0.5)
        grad_q_CRTK[:, :, start:stop] = grad_q_CqK.view(pairs, repeats, -1, width)
        grad_k_CSK = torch.bmm(ds_CqS.mT, q_CqK).float()
        if stop == length:
            grad_k_CTK, grad_v_CTK = grad_k_CSK, grad_v_CSK
        else:
            grad_k_CTK[:, :stop] += grad_k_CSK
            grad_v_CTK[:, :stop] += grad_v_CSK
    return grad_q_CRTK, grad_k_CTK.mul_(width**-0.5).to(k_CTK.dtype), grad_v_CTK.to(v_CTK.dtype)


class _GeluTanh(torch.autograd.Function):
    """`x sigmoid(z)` with `z = 2 sqrt(2/pi) (x + 0.044715 x^3)`, because `(1 + tanh(z/2)) / 2 = sigmoid(z)`."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, slope = torch.empty_like(x), torch.empty_like(x)
        linear, cubic = 2 * (2 / pi) ** 0.5, 2 * (2 / pi) ** 0.5 * 0.044715
        for x_C, y_C, slope_C in zip(*(tensor.view(-1).split(GELUS) for tensor in (x, y, slope)), strict=True):
            wide_C = x_C.float()
            square_C = wide_C.square()
            gate_C = torch.add(linear, square_C, alpha=cubic).mul_(wide_C).sigmoid_()
            gated_C = wide_C.mul_(gate_C)
            y_C.copy_(gated_C)
            # dy/dx = gate + x gate (1 - gate) dz/dx
            shut_C = gated_C.addcmul_(gated_C, gate_C, value=-1)
            slope_C.copy_(gate_C.addcmul_(shut_C, torch.add(linear, square_C, alpha=3 * cubic, out=square_C)))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx, *grad_outputs):
        (slope,) = ctx.saved_tensors
        return grad_outputs[0] * slope
