"""The one place that chooses which optimizer updates which parameter."""

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.optim.adamw_8bit import AdamW8bit
from meshwright.optim.muon import Muon
from meshwright.optim.paged_adamw import PagedAdamW
from meshwright.optim.parameterwise import Parameterwise
from meshwright.spec.model import Parameter
from meshwright.spec.training import OptimizerSpec


class Optimizers:
    """The optimizers of one run, driven together; every parameter belongs to exactly one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self._owner = {
            id(parameter): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def step(self) -> None:
        """Update every parameter once."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of one parameter, created as zeros where no step was made yet."""
        optimizer = self._owner[id(parameter)]
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = _fresh_state(optimizer, parameter)
        return optimizer.state[parameter]


def build_optimizers(
    spec: OptimizerSpec, table: Iterable[Parameter], parameters: dict[str, torch.Tensor]
) -> Optimizers:
    """The optimizers for `parameters` (name -> tensor as stored on this rank, plain or DTensor).

    Weight decay applies to tensors of two dims, never to norms and biases. Muon takes the hidden matrices; the
    embeddings, the head, adapters and all vectors stay with AdamW, and so do experts: to gather all of a layer's for
    the iteration would take more memory than anything else in a step. `table`: the rows that train.
    """
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}  # by learning rate and weight decay
    hidden: list[torch.Tensor] = []
    for row in table:
        tensor = parameters[row.name]
        is_hidden = len(row.dims) == 2 and not {"vocab", "positions", "rank"} & set(row.dims)
        if spec.name == "muon" and is_hidden:
            hidden.append(tensor)
        else:
            decay = spec.weight_decay if len(row.dims) >= 2 else 0.0
            groups.setdefault((spec.lr * row.lr_ratio, decay), []).append(tensor)
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        described = [{"params": found, "lr": lr, "weight_decay": decay} for (lr, decay), found in groups.items()]
        constants: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}
        if spec.name == "adamw_8bit":
            optimizers.append(AdamW8bit(described, **constants))
        elif spec.name == "paged_adamw":
            optimizers.append(PagedAdamW(described, **constants))
        else:
            optimizers.append(torch.optim.AdamW(described, **constants, fused=True))
    if hidden:
        muon = Muon(hidden, lr=spec.muon_lr, momentum=spec.muon_momentum, weight_decay=spec.weight_decay)
        optimizers.append(muon)
    return Optimizers(optimizers)


def _fresh_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, Parameterwise):
        return optimizer.fresh_state(parameter)
    return {  # torch's AdamW
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
