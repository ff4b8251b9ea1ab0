"""Expert load balancing between steps, and its measure."""

import torch
from torch import nn

from meshwright.comm import collectives
from meshwright.devices import widest
from meshwright.models import Decoder
from meshwright.models.moe import Router


class ExpertBalance:
    """The routers of this rank's part of a model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        assert isinstance(model, Decoder)
        self.spec, self.device = model.spec, device
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.load: float | None = None
        """Tokens of the busiest expert divided by the mean of its layer's experts, in the last update; the largest over
        layers. None for models without experts."""

    def begin(self, sequence_weight: float) -> None:
        """Call before a step's forward passes with one sequence's weight in the scaled loss."""
        for router in self.routers:
            router.sequence_weight = sequence_weight
            router.take_load()

    def update(self) -> None:
        """Call with the optimizer's step: measure the loads of the global batch, and update the biases of trained
        routers. Collective.

        Every rank has counted different tokens; layers of other pipeline stages have no load here.
        """
        if not self.spec.num_experts:
            return
        loads_LE = torch.zeros(self.spec.num_layers, self.spec.num_experts, dtype=torch.int64, device=self.device)
        for router in self.routers:
            loads_LE[router.layer] = router.take_load()
        collectives.all_reduce_(loads_LE)
        for router in self.routers:
            if router.weight.requires_grad:
                router.move_bias(loads_LE[router.layer])
        share_LE = loads_LE / loads_LE.to(widest(loads_LE)).mean(1, keepdim=True)  # NaN if a layer has no experts
        self.load = share_LE.nan_to_num(0.0).max().item()
