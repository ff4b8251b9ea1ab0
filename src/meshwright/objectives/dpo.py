"""Direct preference optimisation: makes the chosen of two answers likelier relative to the rejected one.

Rafailov et al., "Direct Preference Optimization" (2023), eq. 7: the loss of a pair is -log sigmoid(beta (r - r_ref)),
where r, its margin, is the log of how much likelier the model makes the chosen answer than the rejected one, and r_ref
the same for the reference. With label smoothing e (conservative DPO) it is (1 - e) times that, and e times the same
with the answers swapped.

Shapes: B rows, T tokens, P pairs of a row.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from meshwright.devices import widest
from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.objectives.objective import Objective, Sums
from meshwright.spec.batch import Batch


class DPO(Objective):
    """The loss of pairs of answers against a reference; `reference` is the model at the start, or none."""

    term = "pair"
    over = "rows"
    needs_pairs = True
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    """`accuracy`: the share of pairs whose chosen answer has become likelier, next to the rejected one, than the
    reference makes it. `margin`: the mean of beta (r - r_ref), the reward's margin, in nats."""

    def __init__(self, *, beta: float, label_smoothing: float = 0.0, reference: Literal["start", "none"] = "start"):
        self.beta, self.label_smoothing, self.reference = beta, label_smoothing, reference

    @property
    def needs_reference(self) -> bool:
        return self.reference == "start"

    def __str__(self) -> str:
        smoothing = f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""
        against = "the model at the start" if self.reference == "start" else "nothing"
        return f"preferences (DPO), beta {self.beta:g}{smoothing}, reference: {against}"

    def count(self, batch: Batch[Any]) -> int:
        """Pairs."""
        assert batch.pairs is not None
        margins_BP = batch.pairs.reference_margins
        return int((margins_BP == margins_BP).sum())  # not NaN, on the host and on a device

    def sums(self, hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        """See the formula above."""
        assert batch.pairs is not None
        margins_BP, reference_BP = pair_margins(hidden_BTD, head, batch), batch.pairs.reference_margins
        is_pair_BP = ~reference_BP.isnan()
        z_BP = self.beta * (margins_BP - reference_BP.nan_to_num().to(margins_BP.dtype))
        smoothing = self.label_smoothing
        terms_BP = -(1 - smoothing) * F.logsigmoid(z_BP) - smoothing * F.logsigmoid(-z_BP)
        gained_BP = margins_BP.detach().to(widest(margins_BP)) - reference_BP  # NaN if there is no such pair
        metrics = {"accuracy": (gained_BP > 0).sum(), "margin": self.beta * gained_BP.nansum()}
        return Sums((terms_BP * is_pair_BP).sum(), metrics)


def pair_margins(hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> torch.Tensor:
    """By how much the chosen answer of each pair is likelier than the rejected one, [B, P], in nats and fp32 (fp64)."""
    assert batch.labels is not None
    assert batch.pairs is not None
    logprobs_BT = -head.token_losses(hidden_BTD, batch.labels)
    answers = 2 * batch.pairs.reference_margins.shape[1]
    room_BS = logprobs_BT.new_zeros(len(logprobs_BT), answers + 1)  # one more for padding
    sums_BS = head.row_sums(room_BS.scatter_add(1, batch.pairs.owners.clamp(max=answers), logprobs_BT))
    return sums_BS[:, 0:-1:2] - sums_BS[:, 1::2]
