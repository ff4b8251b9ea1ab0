"""The one place that computes the loss: output head and cross-entropy together, never holding all logits.

Logits are made for a chunk of tokens at a time, turned in place into their own gradient, and used at once for
the gradients of the hidden states and of the head, as in Liger's fused linear cross-entropy (Hsu et al.,
2024). So the backward pass has nothing to recompute, only to scale.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk, R rows that are widened together.
"""

from math import ceil

import torch

from meshwright.models.cpu_kernels import matmul

IGNORED = -100
"""The label of a token that is not trained on."""

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Logits held at a time. More of them means fewer passes over the head's gradient: one a chunk."""

WIDE_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Numbers held in fp32 at a time; so few on a CPU that every pass over them but the first is in its cache."""

ROW_MULTIPLE = 64
"""Rows of logits start this many elements apart, or a multiple: products over unaligned rows are slow."""


def linear_cross_entropy(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Sum over labels other than -100 of the cross-entropy of `softmax(hidden @ weight.T)`, in nats.

    Args:
        hidden_ND: floating point [N, D].
        weight_VD: the head [V, D], of the same dtype.
        labels_N: int64 [N].

    Returns:
        scalar, fp32 (fp64 for fp64 inputs). Softmax and loss are computed in that dtype and matrix products in that
        of the inputs; over chunks the head's gradient is accumulated in fp32 (fp64).

    Raises:
        RuntimeError: a label outside the vocabulary (on a GPU, as an assertion of the device).
    """
    loss = _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, torch.is_grad_enabled())
    assert isinstance(loss, torch.Tensor)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, train):
        tokens, vocab, wide = len(hidden_ND), len(weight_VD), _wide(hidden_ND.dtype)
        need_hidden, need_weight = (train and need for need in ctx.needs_input_grad[:2])
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
        loss = hidden_ND.new_zeros((), dtype=wide)

        stride = ceil(vocab / ROW_MULTIPLE) * ROW_MULTIPLE
        most = max(1, _budget(CHUNK_BYTES, hidden_ND) // (stride * hidden_ND.element_size()))
        chunk = ceil(tokens / max(1, ceil(tokens / most)))  # chunks of equal size
        logits_CV = hidden_ND.new_empty(chunk, stride)[:, :vocab]
        for start in range(0, tokens, max(1, chunk)):
            rows = slice(start, start + chunk)
            labels_C1 = labels_N[rows, None]
            trained_C1 = labels_C1 != IGNORED
            # A token is ignored by zeroing its hidden state: its row of logits is many times as long.
            hidden_CD = hidden_ND[rows].where(trained_C1, 0)
            grad_CV = matmul(hidden_CD, weight_VD.t(), logits_CV[: len(hidden_CD)])
            losses_C1 = _cross_entropy_(grad_CV, labels_C1.where(trained_C1, 0))
            loss += losses_C1.where(trained_C1, 0).sum()
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = matmul(grad_CV, weight_VD).where(trained_C1, 0)
            if grad_weight_VD is not None:
                _add_product_(grad_weight_VD, grad_CV, hidden_CD)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.dtype = hidden_ND.dtype
        return loss

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_loss,) = grad_outputs
        grads = [None if grad is None else _scaled(grad, grad_loss, ctx.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None)


def _cross_entropy_(logits_CV: torch.Tensor, targets_C1: torch.Tensor) -> torch.Tensor:
    """The losses [C, 1] in fp32 (fp64); `logits_CV` becomes their gradient, softmax - one-hot, in place."""
    losses_C1 = torch.empty_like(targets_C1, dtype=_wide(logits_CV.dtype))
    rows = _wide_rows(logits_CV)
    wide_RV = losses_C1.new_empty(min(rows, len(logits_CV)), logits_CV.shape[1])
    for logits_RV, targets_R1, losses_R1 in zip(
        logits_CV.split(rows), targets_C1.split(rows), losses_C1.split(rows), strict=True
    ):
        work_RV = wide_RV[: len(logits_RV)].copy_(logits_RV)
        above_R1 = work_RV.amax(1, keepdim=True) - work_RV.gather(1, targets_R1)
        torch.softmax(work_RV, 1, out=work_RV)
        # logsumexp is the largest logit less the logarithm of its probability, which is never small.
        torch.sub(above_R1, work_RV.amax(1, keepdim=True).log(), out=losses_R1)
        work_RV.scatter_(1, targets_R1, work_RV.gather(1, targets_R1) - 1)
        logits_RV.copy_(work_RV)
    return losses_C1


def _add_product_(total_VD: torch.Tensor, grad_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """total += grad.T @ hidden; by rows of the total, so that no product is held in full or leaves the cache."""
    rows = _wide_rows(total_VD)
    for total_RD, grad_CR in zip(total_VD.split(rows), grad_CV.split(rows, dim=1), strict=True):
        # Widened before it is added: adding across dtypes is ten times slower on a CPU.
        total_RD += matmul(grad_CR.t(), hidden_CD).to(total_RD.dtype)


def _scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`grad * factor`, rounded to `dtype` once; by rows, so that the product is never held in full."""
    scaled, rows = torch.empty_like(grad, dtype=dtype), _wide_rows(grad)
    for source, target in zip(grad.split(rows), scaled.split(rows), strict=True):
        target.copy_(source * factor)
    return scaled


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses and sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide_rows(matrix: torch.Tensor) -> int:
    return max(1, _budget(WIDE_BYTES, matrix) // (matrix.shape[1] * _wide(matrix.dtype).itemsize))


def _budget(budgets: dict[str, int], tensor: torch.Tensor) -> int:
    return budgets["cpu" if tensor.device.type == "cpu" else "cuda"]
