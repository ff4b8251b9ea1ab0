"""AdamW over this rank's shards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshwright.optim.shards import local


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), given local tensors.

    An elementwise update needs no other rank's numbers. With DTensors, torch would first derive the sharding of every
    tensor of the update: 0.8 s of CPU time for 300 parameters at the first step, 7 ms at each later one.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Raises `ValueError` if its gradient is sharded differently."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [_alike(parameter.grad, parameter) for parameter in parameters]
            for parameter in parameters:
                self.state[parameter] = self.state[parameter] or self.fresh_state(parameter)
            states = [self.state[parameter] for parameter in parameters]
            beta1, beta2 = group["betas"]
            adamw(
                [local(parameter) for parameter in parameters],
                gradients,
                *([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")),
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, sharded like the parameter."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _alike(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The local gradient."""
    if isinstance(parameter, DTensor) and (
        not isinstance(gradient, DTensor) or gradient.placements != parameter.placements
    ):
        raise ValueError(f"a gradient is laid out as {gradient}, its parameter as {parameter.placements}")
    return local(gradient)
