"""Delayed scales between steps: the largest values of a step, over all ranks, join each layer's history."""

import torch
from torch import nn

from meshwright.comm import collectives
from meshwright.models.low_precision import ROLES, AmaxHistory


class DelayedScaling:
    """The histories of a model, or of this rank's part of it.

    Scales are constant during a step, and computed from the maxima over its whole global batch. So the split of a batch
    into microbatches and ranks does not matter.
    """

    def __init__(self, model: nn.Module, layers: int, device: torch.device) -> None:
        """`layers`: the layers with such a history, wherever they are."""
        self.layers, self.device = layers, device
        self.histories = [module for module in model.modules() if isinstance(module, AmaxHistory)]

    def begin(self) -> None:
        """Before a step's forward passes."""
        for history in self.histories:
            history.current.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """With the optimizer's step: take the step's values into the histories. Collective."""
        if not self.layers:
            return
        amax_L3 = torch.zeros(self.layers, len(ROLES), device=self.device)
        for history in self.histories:
            amax_L3[history.place] = history.current
        collectives.all_reduce_(amax_L3, op="max")
        for history in self.histories:
            history.turn(amax_L3[history.place])
