"""The one place that computes the loss: output head and cross-entropy together, never holding all logits.

Logits are made for a chunk of tokens at a time, turned into their own gradient in place, and used at once for
the gradients of the hidden states and of the head, as in Liger's fused linear cross-entropy (Hsu et al.,
2024). So the backward pass has nothing to recompute, only to scale.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

import torch

IGNORED = -100
CHUNK_BYTES = 256 * 2**20


def linear_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor
) -> torch.Tensor:
    """Sum over labels other than -100 of the cross-entropy of `hidden @ weight.T`, in nats.

    Args:
        hidden_ND: floating point [N, D].
        weight_VD: the head [V, D], same dtype.
        labels_N: int64 [N].

    Returns:
        scalar, fp32 (fp64 for fp64 inputs).
    """
    train = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, train)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, train):
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        need_hidden = train and ctx.needs_input_grad[0]
        need_weight = train and ctx.needs_input_grad[1]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
        chunk = max(1, CHUNK_BYTES // (weight_VD.shape[0] * wide.itemsize))
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            trained_C = labels_C != IGNORED
            target_C1 = labels_C.clamp(min=0)[:, None]
            logits_CV = (hidden_CD @ weight_VD.t()).to(wide)
            target_logits_C1 = logits_CV.gather(1, target_C1)
            lse_C1 = logits_CV.logsumexp(1, keepdim=True)
            loss += ((lse_C1 - target_logits_C1)[:, 0] * trained_C).sum()
            if not train:
                continue
            grad_CV = logits_CV.sub_(lse_C1).exp_()
            grad_CV.scatter_add_(1, target_C1, torch.full_like(lse_C1, -1.0))
            grad_CV = grad_CV.mul_(trained_C[:, None]).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_CD
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.dtype = hidden_ND.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grads = [None if grad is None else (grad * grad_loss).to(ctx.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None)
