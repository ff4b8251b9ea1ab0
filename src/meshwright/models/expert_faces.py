"""Experts of transformers whose rows are dispatched: to the ranks that hold them, or to parts in one process.

transformers' module computes all experts of a layer from tokens, their chosen experts, and the weights of these. Here
every chosen pair is a row of its own: rows are sorted by expert and dispatched, transformers' module computes each with
one expert and a weight of 1, and the rows of a token are added with their weights.

Shapes: N tokens, D hidden, K experts of a token, E experts, L experts of a part, M = N K rows, P rows of a part.
"""

from typing import Any

import torch

from meshwright.models.faces import Face
from meshwright.models.moe import Dispatch, Rows
from meshwright.spec.foreign import ExpertModule


class ExpertsFace(Face):
    """transformers' module of a layer's experts. A slot: `dispatch`."""

    described: ExpertModule
    dispatch: Dispatch = Dispatch()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tokens [N, D], their experts int64 [N, K], and weights [N, K], to [N, D]."""
        given = dict(enumerate(args)) | kwargs
        x_ND, experts_NK, weights_NK = (given[key] for key in self.described.arguments)
        chosen_M = experts_NK.flatten()
        order_M = chosen_M.argsort(stable=True)
        counts_E = chosen_M.new_zeros(self.described.count).scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
        x_MD = x_ND[order_M // experts_NK.shape[1]]
        y_MD = self.dispatch(self.compute_rows, x_MD, counts_E)
        y_NKD = y_MD[order_M.argsort()].unflatten(0, experts_NK.shape)
        return (y_NKD * weights_NK[..., None]).sum(1).to(x_ND.dtype)

    def compute_rows(self, x_PD: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[P, D] to [P, D]: rows sorted by this part's experts. Without rows, a row of zeros gives the weights a
        gradient of zeros, which ranks sum."""
        counts_L = rows.counts.sum(1)
        experts_P = torch.arange(len(counts_L), device=x_PD.device).repeat_interleave(counts_L, output_size=len(x_PD))
        if not (rows_here := len(x_PD)):
            x_PD, experts_P = x_PD.new_zeros(1, x_PD.shape[1]), experts_P.new_zeros(1)
        values = x_PD, experts_P[:, None], x_PD.new_ones(len(x_PD), 1)
        given = dict(zip(self.described.arguments, values, strict=True))
        args = [given[key] for key in sorted(key for key in given if isinstance(key, int))]
        theirs: Any = super()
        return theirs.forward(*args, **{key: one for key, one in given.items() if isinstance(key, str)})[:rows_here]

    def extra_repr(self) -> str:
        """The contents of the slots."""
        return ", ".join(filter(None, (f"dispatch: {self.dispatch}", super().extra_repr())))
