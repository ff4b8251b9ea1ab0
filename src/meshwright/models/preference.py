"""The one place that computes the loss of preferences: direct preference optimisation.

Rafailov et al., "Direct Preference Optimization" (2023), eq. 7: of two answers to a prompt, of which people chose one,
the loss is -log sigmoid(beta (r - r_ref)), where r is the log of how much likelier the model makes the chosen answer
than the rejected one, and r_ref the same for the reference. With label smoothing e (conservative DPO) it is (1 - e)
times that, and e times the same with the answers swapped.

Shapes: B rows, T tokens, P pairs of a row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


class PreferenceLoss:
    """The loss of rows in which pairs of answers lie one behind another: documents 0 and 1 are the first pair."""

    def __init__(self, *, beta: float, label_smoothing: float) -> None:
        self.beta, self.label_smoothing = beta, label_smoothing
        self.complete: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
        """Makes of each answer's sum over the tokens that are here that over all, without changing gradients; a
        strategy that splits rows replaces it."""
        self.counts = True
        """Whether these pairs are counted here, and not where other tokens of them are."""
        self.seen: list[torch.Tensor] | None = None
        """Where it is a list, the margins r [B, P] of every microbatch are appended, in fp64 and without gradient."""

    def __call__(
        self, losses_BT: torch.Tensor, documents_BT: torch.Tensor, references_BP: torch.Tensor
    ) -> torch.Tensor:
        """The sum over pairs, a scalar; 0 where the pairs are counted elsewhere, with the same gradient.

        Args:
            losses_BT: each token's cross-entropy, 0 where it carries no loss.
            documents_BT: the document of each of these tokens.
            references_BP: r_ref in fp64, NaN where a row has no such pair.
        """
        pairs = references_BP.shape[1]
        room_BS = losses_BT.new_zeros(len(losses_BT), 2 * pairs + 1)  # one more for padding
        sums_BS = room_BS.scatter_add(1, documents_BT.clamp(max=2 * pairs), -losses_BT)
        logs_BS = self.complete(sums_BS)
        margins_BP = logs_BS[:, 0 : 2 * pairs : 2] - logs_BS[:, 1 : 2 * pairs : 2]
        if self.seen is not None:
            self.seen.append(margins_BP.detach().double())
        is_pair_BP = ~references_BP.isnan()
        z_BP = self.beta * (margins_BP - references_BP.nan_to_num().to(margins_BP.dtype))
        smoothing = self.label_smoothing
        terms_BP = -(1 - smoothing) * F.logsigmoid(z_BP) - smoothing * F.logsigmoid(-z_BP)
        loss = (terms_BP * is_pair_BP).sum()
        return loss if self.counts else loss - loss.detach()
