"""The one place that keeps experts evenly loaded from step to step."""

from torch import nn

from meshwright.models.moe import Router


class ExpertBalance:
    """The routers of a model, or of the part of it that this rank has."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]

    def begin(self, sequence_weight: float) -> None:
        """Before a step's forward passes: one sequence's share in the objective, as the loss is scaled."""
        for router in self.routers:
            router.sequence_weight = sequence_weight
            router.take_load()
