"""The fused head and cross-entropy, which never materializes all logits.

Logits are computed for one chunk of tokens at a time and overwritten in place by their own gradient. The gradients of
the hidden states and of the head are computed from it at once, as in Liger's fused linear cross-entropy (Hsu et al.,
2024). The backward pass recomputes nothing; it only scales.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk, R rows that are converted to fp32 together.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from math import ceil
from typing import Protocol

import torch

from meshwright.devices import of_kind
from meshwright.models.cpu_kernels import matmul
from meshwright.torch_internals import assert_on_device

IGNORED = -100
"""The label of a token that is not trained on."""

CHUNK_BYTES = {"cpu": 2**26, "gpu": 2**30}
"""Bytes of logits held at a time. Larger chunks mean fewer passes over the head's gradient: one per chunk."""

WIDE_BYTES = {"cpu": 2**22, "gpu": 2**28}
"""Numbers held in fp32 at a time; on a CPU few enough that every pass after the first reads from the cache."""

BUDGETS_OF: ContextVar[str | None] = ContextVar("BUDGETS_OF", default=None)
"""A slot: the device type whose budgets apply, if it differs from the tensors'."""

ROW_MULTIPLE = 64
"""Rows of logits start a multiple of this many elements apart: products over unaligned rows are slow."""


class VocabularyShare(Protocol):
    """This rank's share of the head's rows, and reductions over all shares."""

    first: int
    """Token id of this rank's first row."""
    vocab: int
    """Size of the whole vocabulary."""
    rows: int
    """Rows of the largest share; from it all ranks derive the same chunks."""

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over all shares; no gradient."""
        ...

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum over all shares; its gradient goes to this part only: every share has the sum."""
        ...


def linear_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, share: VocabularyShare | None = None
) -> torch.Tensor:
    """Sum over labels other than -100 of the cross-entropy of `softmax(hidden @ weight.T)`, in nats.

    Args:
        hidden_ND: floating point [N, D].
        weight_VD: the head [V, D], of the same dtype.
        labels_N: int64 [N].
        share: this rank's rows, where other ranks hold the rest. All ranks pass the same hidden states and labels and
            get the same loss; the gradient of the hidden states is this rank's part, to be summed over shares.

    Returns:
        scalar, fp32 (fp64 for fp64 inputs). Softmax and loss are computed in this dtype, matrix products in the inputs'
        dtype; the head's gradient is accumulated over chunks in fp32 (fp64).

    Raises:
        RuntimeError: a label outside the vocabulary (on a GPU, as a device-side assertion).
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, torch.is_grad_enabled(), share)


def linear_token_losses(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, share: VocabularyShare | None = None
) -> torch.Tensor:
    """The terms of `linear_cross_entropy` one by one, [N], 0 if the label is -100: for losses that are not a sum.

    The backward pass recomputes the logits, chunk by chunk.
    """
    return _LinearTokenLosses.apply(hidden_ND, weight_VD, labels_N, share)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, train, share):
        need_hidden, need_weight = (train and need for need in ctx.needs_input_grad[:2])
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide(weight_VD.dtype)) if need_weight else None
        loss = hidden_ND.new_zeros((), dtype=wide(hidden_ND.dtype))
        for rows, hidden_CD, trained_C1, losses_C1, grad_CV in _chunks(hidden_ND, weight_VD, labels_N, share):
            loss += losses_C1.sum()
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = matmul(grad_CV, weight_VD).where(trained_C1, 0)
            if grad_weight_VD is not None:
                add_product_(grad_weight_VD, grad_CV, hidden_CD)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.dtype = hidden_ND.dtype
        return loss

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_loss,) = grad_outputs
        grads = [None if grad is None else _scaled(grad, grad_loss, ctx.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None)


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, share):
        losses_N = hidden_ND.new_zeros(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        for rows, _, _, losses_C1, _ in _chunks(hidden_ND, weight_VD, labels_N, share):
            losses_N[rows] = losses_C1[:, 0]
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.share = share
        return losses_N

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_N,) = grad_outputs
        hidden_ND, weight_VD, labels_N = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide(weight_VD.dtype)) if need_weight else None
        # Logits are recomputed: only now is each label's incoming gradient known.
        for rows, hidden_CD, trained_C1, _, grad_CV in _chunks(hidden_ND, weight_VD, labels_N, ctx.share):
            grad_CV *= grad_N[rows, None].to(grad_CV.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = matmul(grad_CV, weight_VD).where(trained_C1, 0)
            if grad_weight_VD is not None:
                add_product_(grad_weight_VD, grad_CV, hidden_CD)
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None


def logit_chunks(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, share: VocabularyShare | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The logits of all tokens in chunks of `CHUNK_BYTES`: (which tokens, their hidden states [C, D], 0 without a
    label, their labels [C], a valid one if there is none, whether they have a label [C], their logits [C, V] in the
    dtype of the hidden states, which the next chunk overwrites)."""
    tokens, vocab, first = len(hidden_ND), len(weight_VD), 0
    if share is not None:
        first = share.first
        known_N = (labels_N == IGNORED) | (labels_N >= 0) & (labels_N < share.vocab)
        assert_on_device(known_N.all(), "a label is outside the vocabulary")
    stride = ceil((vocab if share is None else share.rows) / ROW_MULTIPLE) * ROW_MULTIPLE
    most = max(1, _budget(CHUNK_BYTES, hidden_ND) // (stride * hidden_ND.element_size()))
    chunk = ceil(tokens / max(1, ceil(tokens / most)))  # chunks of equal size
    room_CS = hidden_ND.new_empty(chunk, stride)
    room_CS[:, vocab:].zero_()  # oneDNN's bf16 product of the gradient with the weight multiplies the padding by 0
    logits_CV = room_CS[:, :vocab]
    for start in range(0, tokens, max(1, chunk)):
        rows = slice(start, start + chunk)
        trained_C = labels_N[rows] != IGNORED
        # A token is ignored by zeroing its hidden state: its row of logits is many times longer.
        hidden_CD = hidden_ND[rows].where(trained_C[:, None], 0)
        made_CV = matmul(hidden_CD, weight_VD.t(), logits_CV[: len(hidden_CD)])
        yield rows, hidden_CD, labels_N[rows].where(trained_C, first), trained_C, made_CV


def _chunks(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, share: VocabularyShare | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Chunk by chunk: (its tokens, their hidden states [C, D], whether they carry loss [C, 1], their losses [C, 1], the
    losses' gradient with respect to the logits [C, V], which the next chunk overwrites)."""
    first = 0 if share is None else share.first
    for rows, hidden_CD, labels_C, trained_C, grad_CV in logit_chunks(hidden_ND, weight_VD, labels_N, share):
        losses_C1 = _cross_entropy_(grad_CV, labels_C[:, None] - first, share)
        yield rows, hidden_CD, trained_C[:, None], losses_C1.where(trained_C[:, None], 0), grad_CV


def _cross_entropy_(logits_CV: torch.Tensor, targets_C1: torch.Tensor, share: VocabularyShare | None) -> torch.Tensor:
    """The losses [C, 1] in fp32 (fp64); `logits_CV` becomes their gradient, softmax - one-hot, in place.

    A target outside this share's rows belongs to another share.
    """
    here_C1 = torch.ones_like(targets_C1, dtype=torch.bool)
    if share is not None:
        here_C1 = (targets_C1 >= 0) & (targets_C1 < logits_CV.shape[1])
        targets_C1 = targets_C1.where(here_C1, 0)
    # Of each row: the largest logit and its probability; the target logit's distance below it, and the target's
    # probability.
    largest_C1, peak_C1, below_C1, target_C1 = (
        torch.empty_like(targets_C1, dtype=wide(logits_CV.dtype)) for _ in range(4)
    )
    rows, soften = _wide_rows(logits_CV), of_kind({"cpu": _soften_from_cache, "gpu": _soften_in_few_passes}, logits_CV)
    wide_RV = largest_C1.new_empty(min(rows, len(logits_CV)), logits_CV.shape[1])
    for start in range(0, len(logits_CV), rows):
        block = slice(start, start + rows)
        logits_RV, targets_R1 = logits_CV[block], targets_C1[block]
        parts = largest_C1[block], peak_C1[block], below_C1[block], target_C1[block]
        soften(logits_RV, targets_R1, wide_RV[: len(logits_RV)], *parts)
    if share is None:
        # logsumexp is the largest logit less the logarithm of its probability, which is never small.
        losses_C1 = below_C1 - peak_C1.log()
    else:
        top_C1 = share.maximum(largest_C1)
        mass_C1 = (largest_C1 - top_C1).exp() / peak_C1  # sum over the rows here of exp(logit - top)
        below_C1 += top_C1 - largest_C1
        sums_C2 = share.sum(torch.cat((mass_C1, below_C1.where(here_C1, 0)), 1))
        losses_C1 = sums_C2[:, :1].log() + sums_C2[:, 1:]
        part_C1 = mass_C1 / sums_C2[:, :1]
        logits_CV *= part_C1
        target_C1 *= part_C1
    gradients_C1 = (target_C1 - 1).to(logits_CV.dtype)
    # By index, not by `scatter_`, which in half precision on a CPU traverses all logits.
    places = torch.arange(len(logits_CV), device=logits_CV.device)[:, None], targets_C1
    logits_CV[places] = gradients_C1.where(here_C1, logits_CV[places])
    return losses_C1


def _soften_from_cache(
    logits_RV: torch.Tensor, targets_R1: torch.Tensor, wide_RV: torch.Tensor, *parts_R1: torch.Tensor
) -> None:
    """`logits` become probabilities; the parts are those that `_cross_entropy_` needs. `wide` stays in the cache."""
    largest_R1, peak_R1, below_R1, target_R1 = parts_R1
    wide_RV.copy_(logits_RV)
    torch.amax(wide_RV, 1, keepdim=True, out=largest_R1)
    torch.sub(largest_R1, wide_RV.gather(1, targets_R1), out=below_R1)
    torch.softmax(wide_RV, 1, out=wide_RV)
    torch.amax(wide_RV, 1, keepdim=True, out=peak_R1)
    torch.gather(wide_RV, 1, targets_R1, out=target_R1)
    logits_RV.copy_(wide_RV)


def _soften_in_few_passes(
    logits_RV: torch.Tensor, targets_R1: torch.Tensor, wide_RV: torch.Tensor, *parts_R1: torch.Tensor
) -> None:
    """The same, in three passes over all logits instead of five: a GPU's memory bounds them. Its softmax widens as it
    reads, and the largest probability is the largest logit's."""
    largest_R1, peak_R1, below_R1, target_R1 = parts_R1
    top_R1, places_R1 = logits_RV.max(1, keepdim=True)
    largest_R1.copy_(top_R1)
    torch.sub(largest_R1, logits_RV.gather(1, targets_R1), out=below_R1)
    torch.softmax(logits_RV, 1, dtype=wide_RV.dtype, out=wide_RV)
    torch.gather(wide_RV, 1, places_R1, out=peak_R1)
    torch.gather(wide_RV, 1, targets_R1, out=target_R1)
    logits_RV.copy_(wide_RV)


def add_product_(total_VD: torch.Tensor, grad_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """total += grad.T @ hidden, by rows of the total, so that the product is never held in full and stays in the
    cache."""
    rows = _wide_rows(total_VD)
    for total_RD, grad_CR in zip(total_VD.split(rows), grad_CV.split(rows, dim=1), strict=True):
        # Cast before the addition: adding across dtypes is ten times slower on a CPU.
        total_RD += matmul(grad_CR.t(), hidden_CD).to(total_RD.dtype)


def _scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`grad * factor`, rounded to `dtype` once, by rows, so that the product is never held in full."""
    scaled, rows = torch.empty_like(grad, dtype=dtype), _wide_rows(grad)
    for source, target in zip(grad.split(rows), scaled.split(rows), strict=True):
        target.copy_(source * factor)
    return scaled


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses and sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide_rows(matrix: torch.Tensor) -> int:
    return max(1, _budget(WIDE_BYTES, matrix) // (matrix.shape[1] * wide(matrix.dtype).itemsize))


def _budget(budgets: dict[str, int], tensor: torch.Tensor) -> int:
    kind = BUDGETS_OF.get()
    return of_kind(budgets, tensor) if kind is None else budgets[kind]
