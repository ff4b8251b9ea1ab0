"""Attention to a part of the keys at a time, with results that add up to full attention.

A part's result y comes with the logarithm L of the sum of its exponentiated scores. Two parts are combined with weights
exp(L - L'), where exp(L') is the sum of both. The backward pass of each part needs only y and L of the whole (Dao et
al., "FlashAttention", 2022; Liu et al., "Ring Attention with Blockwise Transformers", 2023).

Shapes: B batch, H heads, G key and value heads, Q queries, S keys of the part, K head_dim.
"""

from typing import Literal, NamedTuple

import torch

from meshwright.devices import on_cpu
from meshwright.models.cpu_kernels import SCORES
from meshwright.models.loss import wide
from meshwright.torch_internals import FLASH_CPU, FLASH_CPU_BACKWARD, FLASH_CUDA, FLASH_CUDA_BACKWARD

aten = torch.ops.aten

PartMask = torch.Tensor | Literal["causal", "all"]
"""The keys of a part that a query sees: all, those up to its own position (Q = S), or bool [Q, S] or [B, 1, Q, S]."""


def own_chunks(rank: int, degree: int) -> tuple[int, int]:
    """The chunks of a row, of 2 x `degree` in all, that a rank holds under zigzag order: an early and a late one, so
    that all ranks have the same work under a causal mask."""
    return rank, 2 * degree - 1 - rank


def attend_part(
    q_BHQK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: PartMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part's result [B, H, Q, K] and logsumexp [B, H, Q], both fp32 (fp64 for fp64); without autograd.

    A query that sees no key of the part gets 0 and -inf.
    """
    k_BHSK, v_BHSK = (_repeat(x, q_BHQK.shape[1]) for x in (k_BGSK, v_BGSK))
    dtype = wide(q_BHQK.dtype)
    if not isinstance(mask, torch.Tensor):
        flash = _flash_kernels(q_BHQK, v_BHSK)
        if flash is not None:
            y_BHQK, logsumexp_BHQ, *_ = flash[0](q_BHQK, k_BHSK, v_BHSK, 0.0, mask == "causal")
            return y_BHQK.to(dtype, copy=True), logsumexp_BHQ.to(dtype, copy=True)
    y_BHQK = q_BHQK.new_empty(*q_BHQK.shape[:-1], v_BHSK.shape[-1], dtype=dtype)
    logsumexp_BHQ = y_BHQK.new_empty(y_BHQK.shape[:-1])
    for rows in _blocks(q_BHQK, k_BHSK):
        scores_BHqS = _scores(q_BHQK, k_BHSK, mask, rows)
        logsumexp_BHq = scores_BHqS.logsumexp(-1)
        logsumexp_BHQ[:, :, rows] = logsumexp_BHq
        # Queries that see nothing have probabilities of 0, not NaN.
        p_BHqS = (scores_BHqS - logsumexp_BHq.where(logsumexp_BHq.isfinite(), 0)[..., None]).exp()
        y_BHQK[:, :, rows] = p_BHqS.to(v_BHSK.dtype) @ v_BHSK
    return y_BHQK, logsumexp_BHQ


class Queries(NamedTuple):
    """Queries with what the backward pass of every part needs: their gradient and results over all parts together."""

    grad: torch.Tensor
    """The gradient of y, [B, H, Q, K]."""
    q: torch.Tensor
    y: torch.Tensor
    """In the dtype of q, [B, H, Q, K]."""
    logsumexp: torch.Tensor


def attend_part_backward(
    queries: Queries, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: PartMask
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part's share of the gradients of q, k and v, fp32 (fp64 for fp64)."""
    q_BHQK = queries.q
    k_BHSK, v_BHSK = (_repeat(x, q_BHQK.shape[1]) for x in (k_BGSK, v_BGSK))
    flash = None if isinstance(mask, torch.Tensor) else _flash_kernels(q_BHQK, v_BHSK)
    if flash is not None:
        grads = flash[1](queries, k_BHSK, v_BHSK, mask == "causal")
        grad_q_BHQK, grad_k_BHSK, grad_v_BHSK = (grad.to(wide(q_BHQK.dtype)) for grad in grads)
    else:
        grad_q_BHQK, grad_k_BHSK, grad_v_BHSK = _plain_backward(queries, k_BHSK, v_BHSK, mask)
    groups = k_BGSK.shape[1], -1
    return grad_q_BHQK, grad_k_BHSK.unflatten(1, groups).sum(2), grad_v_BHSK.unflatten(1, groups).sum(2)


def add_part_(
    y_BHQK: torch.Tensor, logsumexp_BHQ: torch.Tensor, part_BHQK: torch.Tensor, part_logsumexp_BHQ: torch.Tensor
) -> None:
    """Add a part to the sum of others, in place; each query must have seen a key in one of the others."""
    total_BHQ = torch.logaddexp(logsumexp_BHQ, part_logsumexp_BHQ)
    y_BHQK.mul_((logsumexp_BHQ - total_BHQ).exp()[..., None])
    y_BHQK.addcmul_(part_BHQK, (part_logsumexp_BHQ - total_BHQ).exp()[..., None])
    logsumexp_BHQ.copy_(total_BHQ)


def _flash_kernels(q_BHQK: torch.Tensor, v_BHSK: torch.Tensor):
    """torch's flash kernels (forward, backward) if they support this dtype, device and head width; else None."""
    if q_BHQK.shape[-1] != v_BHSK.shape[-1]:
        return None
    if on_cpu(q_BHQK):
        return FLASH_CPU, _flash_backward_cpu
    half = q_BHQK.dtype in (torch.bfloat16, torch.float16)
    if half and q_BHQK.shape[-1] % 8 == 0 and q_BHQK.shape[-1] <= 256:
        return FLASH_CUDA, _flash_backward_gpu
    return None


def _flash_backward_cpu(queries: Queries, k: torch.Tensor, v: torch.Tensor, causal: bool):
    grad, q, y, logsumexp = queries
    return FLASH_CPU_BACKWARD(grad, q, k, v, y, logsumexp, 0.0, causal)


def _flash_backward_gpu(queries: Queries, k: torch.Tensor, v: torch.Tensor, causal: bool):
    grad, q, y, logsumexp = queries
    # Without dropout the random state is not read, and without nested tensors neither are the sequences' offsets.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = q.shape[2], k.shape[2]
    return FLASH_CUDA_BACKWARD(grad, q, k, v, y, logsumexp, None, None, *lengths, 0.0, causal, unused, unused)


def _plain_backward(queries: Queries, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor, mask: PartMask):
    """The backward pass by ordinary products, some queries at a time."""
    grad_BHQK, q_BHQK, y_BHQK, logsumexp_BHQ = queries
    scale, dtype, exact = q_BHQK.shape[-1] ** -0.5, q_BHQK.dtype, wide(q_BHQK.dtype)
    grad_q_BHQK = torch.empty_like(q_BHQK, dtype=exact)
    grad_k_BHSK, grad_v_BHSK = (torch.zeros_like(x, dtype=exact) for x in (k_BHSK, v_BHSK))
    weighted_BHQ1 = (grad_BHQK.to(exact) * y_BHQK.to(exact)).sum(-1, keepdim=True)
    for rows in _blocks(q_BHQK, k_BHSK):
        dy_BHqK = grad_BHQK[:, :, rows]
        p_BHqS = (_scores(q_BHQK, k_BHSK, mask, rows) - logsumexp_BHQ[:, :, rows, None]).exp()
        ds_BHqS = p_BHqS * ((dy_BHqK @ v_BHSK.mT).to(exact) - weighted_BHQ1[:, :, rows]) * scale
        grad_q_BHQK[:, :, rows] = ds_BHqS.to(dtype) @ k_BHSK
        grad_k_BHSK += ds_BHqS.to(dtype).mT @ q_BHQK[:, :, rows]
        grad_v_BHSK += p_BHqS.to(dtype).mT @ dy_BHqK
    return grad_q_BHQK, grad_k_BHSK, grad_v_BHSK


def _scores(q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, mask: PartMask, rows: slice) -> torch.Tensor:
    """Scaled scores of some queries, fp32 (fp64); -inf for keys that they do not see."""
    scores_BHqS = (q_BHQK[:, :, rows] @ k_BHSK.mT).to(wide(q_BHQK.dtype)) * q_BHQK.shape[-1] ** -0.5
    if mask == "all":
        return scores_BHqS
    if isinstance(mask, torch.Tensor):
        hidden = ~mask[..., rows, :]
    else:
        hidden = torch.ones(scores_BHqS.shape[-2:], dtype=torch.bool, device=q_BHQK.device).triu_(1 + rows.start)
    return scores_BHqS.masked_fill_(hidden, -torch.inf)


def _blocks(q_BHQK: torch.Tensor, k_BHSK: torch.Tensor) -> list[slice]:
    """Slices of the queries, each with at most SCORES scores for a head and row of the batch."""
    queries = max(1, SCORES // k_BHSK.shape[2])
    return [slice(start, min(start + queries, q_BHQK.shape[2])) for start in range(0, q_BHQK.shape[2], queries)]


def _repeat(x_BGSK: torch.Tensor, heads: int) -> torch.Tensor:
    """Each key and value head repeated for each query head that shares it."""
    repeats = heads // x_BGSK.shape[1]
    return x_BGSK if repeats == 1 else x_BGSK.repeat_interleave(repeats, 1)
