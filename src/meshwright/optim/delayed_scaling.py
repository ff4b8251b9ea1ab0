"""Delayed scales between steps: each layer's history records the largest values of a step, over all ranks."""

import torch
from torch import nn

from meshwright.comm import collectives
from meshwright.models.low_precision import AmaxHistory


class DelayedScaling:
    """The histories of a model, or of this rank's part of it.

    Scales are constant during a step and computed from the maxima over its whole global batch, so the split of a batch
    into microbatches and ranks does not matter.
    """

    def __init__(self, model: nn.Module, rows: int, device: torch.device) -> None:
        """`rows`: the number in all histories, on any rank."""
        self.rows, self.device = rows, device
        self.histories = [module for module in model.modules() if isinstance(module, AmaxHistory)]

    def begin(self) -> None:
        """Call before a step's forward passes."""
        for history in self.histories:
            history.current.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Call with the optimizer's step: record the step's values in the histories. Collective."""
        if not self.rows:
            return
        amax_R = torch.zeros(self.rows, device=self.device)
        parts = [amax_R[history.place :][: len(history.current)] for history in self.histories]
        for part, history in zip(parts, self.histories, strict=True):
            part.copy_(history.current)
        collectives.all_reduce_(amax_R, op="max")
        for part, history in zip(parts, self.histories, strict=True):
            history.turn(part)
