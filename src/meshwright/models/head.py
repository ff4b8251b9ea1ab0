"""The head: losses and logits of the last hidden states, whole or split over vocabulary and sequence.

Shapes: B rows, T tokens of a row on this rank, D hidden, V vocabulary; N = B * T tokens.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.logits import Logits, TokenTerms, linear_token_terms
from meshwright.models.loss import IGNORED, VocabularyShare, linear_cross_entropy, linear_token_losses, wide
from meshwright.spec.errors import UserError


class SplitVocabulary(VocabularyShare, Protocol):
    """This rank's rows of the head; the other ranks hold the rest and split the hidden states along the sequence."""

    def gather_sequence(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens; backward: the sum of the gradients of all shares."""
        ...

    def own_sequence(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """This rank's part of all tokens, if they need no gradient."""
        ...

    def gather_vocabulary(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, from the logits of this rank's rows."""
        ...


class SplitSequence(Protocol):
    """This rank's tokens of every row; the other ranks hold the rest."""

    counts: bool
    """Whether this rank counts whole-row terms, and not a rank with other tokens of the row."""

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum over all parts of the rows; its gradient goes to this part only: every part has the sum."""
        ...


class HeadSplit(nn.Module):
    """The slots of a head: the ranks that hold the rest of its vocabulary and sequences, if it is split, and how logits
    are computed if only logits are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary: SplitVocabulary | None = None
        self.sequence: SplitSequence | None = None
        self.product: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Hidden states [B, D] to logits [B, V]; None: by the head's weight."""

    def extra_repr(self) -> str:
        """The contents of the slots."""
        product = "" if self.product is None else f", product={self.product}"
        return f"vocabulary={self.vocabulary or 'whole'}, sequence={self.sequence or 'whole'}{product}"


class Head:
    """A head with its weight. Results are equal on all ranks that share the vocabulary."""

    def __init__(self, split: HeadSplit, weight_VD: torch.Tensor) -> None:
        """`weight_VD`: this rank's rows."""
        self.split, self.weight_VD = split, weight_VD

    def loss(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The sum over labels of the cross-entropy in nats, a scalar in fp32 (fp64), without ever holding all logits; a
        label of -100 is ignored."""
        hidden_ND = self._whole(x_BTD).flatten(0, 1)
        return linear_cross_entropy(hidden_ND, self.weight_VD, labels_BT.flatten(), self.split.vocabulary)

    def token_losses(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Each label's cross-entropy [B, T], in nats and fp32 (fp64); 0 if the label is -100."""
        hidden_ND = self._whole(x_BTD).flatten(0, 1)
        losses_N = linear_token_losses(hidden_ND, self.weight_VD, labels_BT.flatten(), self.split.vocabulary)
        return losses_N.view(labels_BT.shape)

    def token_terms(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, terms: TokenTerms, *others: torch.Tensor
    ) -> torch.Tensor:
        """`terms` of each label's logits, [B, T] in fp32 (fp64); 0 if the label is -100.

        `terms` is called chunk by chunk with the `Logits` of C tokens, their labels [C] and their parts of `others` [B,
        T, ...], and once more in the backward pass, so that all logits are never held at once.
        """
        hidden_ND, labels_N = self._whole(x_BTD).flatten(0, 1), labels_BT.flatten()
        rest = (other.flatten(0, 1) for other in others)
        found_N = linear_token_terms(hidden_ND, self.weight_VD, labels_N, terms, self.split.vocabulary, *rest)
        return found_N.view(labels_BT.shape)

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D], in the model's dtype.

        Raises `UserError` if the vocabulary is split, because then no rank has all logits.
        """
        if self.split.vocabulary is not None:
            raise UserError("no rank has all logits of a model that tensor parallelism splits")
        return self._project(x_BTD)

    def logits_at(self, x_1ND: torch.Tensor, places_B: torch.Tensor) -> torch.Tensor:
        """The logits [B, V] at these places of one flat row; if ranks split the sequence, of the whole row."""
        logits_BV = self._project(self._whole(x_1ND)[0, places_B])
        return logits_BV if self.split.vocabulary is None else self.split.vocabulary.gather_vocabulary(logits_BV)

    def next_logits(self, x_BTD: torch.Tensor, asked_BT: torch.Tensor) -> torch.Tensor:
        """The logits [B, V] of the one position in each row that `asked_BT`, bool, marks, on any rank."""
        x_BD = self.row_sums(self._whole(x_BTD).where(asked_BT.unsqueeze(-1), 0).sum(1))
        logits_BV = self._project(x_BD)
        return logits_BV if self.split.vocabulary is None else self.split.vocabulary.gather_vocabulary(logits_BV)

    def row_sums(self, parts: torch.Tensor) -> torch.Tensor:
        """Sums over whole rows, from sums over this rank's tokens."""
        return parts if self.split.sequence is None else self.split.sequence.sum(parts)

    def _project(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BTD, self.weight_VD) if self.split.product is None else self.split.product(x_BTD)

    def _whole(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD if self.split.vocabulary is None else self.split.vocabulary.gather_sequence(x_BTD)


class LogitsHead(Head):
    """The head of a model that computes all its logits itself: the logits replace the hidden states."""

    def __init__(self, split: HeadSplit) -> None:
        self.split = split

    def loss(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return self.token_losses(x_BTD, labels_BT).sum()

    def token_losses(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits_NV = x_BTD.flatten(0, 1).to(wide(x_BTD.dtype))
        losses_N = F.cross_entropy(logits_NV, labels_BT.flatten(), ignore_index=IGNORED, reduction="none")
        return losses_N.view(labels_BT.shape)

    def token_terms(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, terms: TokenTerms, *others: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        logits, trained_BT = Logits(x_BTD.flatten(0, 1).to(wide(x_BTD.dtype))), labels_BT != IGNORED
        found_N = terms(logits, labels_BT.where(trained_BT, 0).flatten(), *(other.flatten(0, 1) for other in others))
        return found_N.view(labels_BT.shape).where(trained_BT, 0)

    def _project(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD
