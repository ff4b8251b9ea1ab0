"""Loss terms over a token's logits: written for whole logits, computed chunk by chunk on this rank's rows.

Shapes: N tokens, C tokens of a chunk, D hidden, V vocabulary, or this rank's rows of it.
"""

from collections.abc import Callable

import torch

from meshwright.models.cpu_kernels import matmul
from meshwright.models.loss import VocabularyShare, add_product_, logit_chunks, wide


class Logits:
    """The logits of some tokens. Other ranks may hold a part; every method returns the result over all parts."""

    def __init__(self, here_CV: torch.Tensor, share: VocabularyShare | None = None) -> None:
        """`here_CV`: in fp32 (fp64), of the whole vocabulary or of the rows of `share`."""
        self.here_CV, self._share = here_CV, share

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of token ids: [C] or [C, K] of the same."""
        places = tokens if self._share is None else tokens - self._share.first
        here = (places >= 0) & (places < self.here_CV.shape[1])
        picked = self.here_CV.gather(1, places.where(here, 0).view(len(tokens), -1)).view(tokens.shape)
        return self._total(picked.where(here, 0))

    def logsumexp(self) -> torch.Tensor:
        """The logarithm of softmax's denominator, [C]."""
        top_C = self.maximum()
        return self._total((self.here_CV - top_C[:, None]).exp().sum(1)).log() + top_C

    def maximum(self) -> torch.Tensor:
        """The largest logit, [C], without a gradient."""
        top_C = self.here_CV.detach().amax(1)
        return top_C if self._share is None else self._share.maximum(top_C)

    def mean(self) -> torch.Tensor:
        """The mean over the whole vocabulary, [C]."""
        return self._total(self.here_CV.sum(1)) / (self.here_CV.shape[1] if self._share is None else self._share.vocab)

    def _total(self, part: torch.Tensor) -> torch.Tensor:
        return part if self._share is None else self._share.sum(part)


TokenTerms = Callable[..., torch.Tensor]
"""(logits of C tokens, their labels [C], any other tensors [C, ...] of these tokens) -> their terms [C]."""


def linear_token_terms(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    terms: TokenTerms,
    share: VocabularyShare | None = None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """`terms` of each label's `hidden @ weight.T`, [N] in fp32 (fp64); 0 if the label is -100.

    As `linear_token_losses`; `terms` is called once more in the backward pass, chunk by chunk. `others`: [N, ...];
    `terms` gets the rows of its tokens.
    """
    return _LinearTokenTerms.apply(hidden_ND, weight_VD, labels_N, terms, share, *others)


class _LinearTokenTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, terms, share, *others):
        found_N = hidden_ND.new_zeros(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        for rows, _, labels_C, trained_C, logits_CV in logit_chunks(hidden_ND, weight_VD, labels_N, share):
            logits = Logits(logits_CV.to(found_N.dtype), share)
            found_C = terms(logits, labels_C, *(other[rows] for other in others))
            found_N[rows] = found_C.where(trained_C, 0)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, *others)
        ctx.terms, ctx.share = terms, share
        return found_N

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_N,) = grad_outputs
        hidden_ND, weight_VD, labels_N, *others = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide(weight_VD.dtype)) if need_weight else None
        for rows, hidden_CD, labels_C, trained_C, logits_CV in logit_chunks(hidden_ND, weight_VD, labels_N, ctx.share):
            with torch.enable_grad():
                wide_CV = logits_CV.to(grad_N.dtype).detach().requires_grad_()
                found_C = ctx.terms(Logits(wide_CV, ctx.share), labels_C, *(other[rows] for other in others))
            (grad_CV,) = torch.autograd.grad(found_C, wide_CV, grad_N[rows].where(trained_C, 0))
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = matmul(grad_CV, weight_VD).where(trained_C[:, None], 0)
            if grad_weight_VD is not None:
                add_product_(grad_weight_VD, grad_CV, hidden_CD)
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return (grad_hidden_ND, grad_weight_VD, None, None, None, *(None for _ in others))
