"""The one place that keeps experts evenly loaded from step to step: the balance loss's weight, and their biases."""

import torch
import torch.distributed as dist
from torch import nn

from meshwright.models import Decoder
from meshwright.models.moe import Router


class ExpertBalance:
    """The routers of a model, or of the part of it that this rank has."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        assert isinstance(model, Decoder)
        self.spec, self.device = model.spec, device
        self.routers = [module for module in model.modules() if isinstance(module, Router)]

    def begin(self, sequence_weight: float) -> None:
        """Before a step's forward passes: one sequence's share in the objective, as the loss is scaled."""
        for router in self.routers:
            router.sequence_weight = sequence_weight
            router.take_load()

    def update(self) -> None:
        """With the optimizer's step: move the biases of trained routers by the loads of the global batch. Collective.

        Every rank has counted different tokens, and layers of other pipeline stages have no load here.
        """
        if not self.spec.router_bias:
            return
        loads_LE = torch.zeros(self.spec.num_layers, self.spec.num_experts, dtype=torch.int64, device=self.device)
        for router in self.routers:
            loads_LE[router.layer] = router.take_load()
        if dist.is_initialized():
            dist.all_reduce(loads_LE)
        for router in self.routers:
            if router.weight.requires_grad:
                router.move_bias(loads_LE[router.layer])
