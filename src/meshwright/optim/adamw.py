"""AdamW: by torch's fused kernel over this rank's shards, and one parameter at a time, with numbers in bf16."""

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshwright.optim.bf16 import as_rows, widened
from meshwright.optim.parameterwise import Parameterwise, next_step, steps_done
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

    def count_on(self, device: torch.device) -> None:
        """Keep the numbers of steps on the device of the step, if parameters live elsewhere between steps."""
        for state in self.state.values():
            state["step"].data = state["step"].to(device)

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


class ParameterwiseAdamW(Parameterwise):
    """AdamW (Loshchilov and Hutter, 2019); subclasses choose how moments are stored."""

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class AdamWBf16(ParameterwiseAdamW):
    """AdamW, computed in fp32, with weights, moments or both in bf16 (`optim/bf16.py`), a few rows at a time."""

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, sharded like the parameter: moments are zero."""
        return {
            "step": steps_done(),
            "exp_avg": self.bf16.fresh_moment(parameter),
            "exp_avg_sq": self.bf16.fresh_moment(parameter),
            **self.bf16.fresh(parameter),
        }

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """One step of one parameter."""
        step = next_step(state)
        gradients, firsts, seconds = (as_rows(x) for x in (gradient, state["exp_avg"], state["exp_avg_sq"]))
        for rows in self.bf16.parts(parameter):
            weight = self.bf16.read(parameter, state, rows)
            part, first, second = (widened(x[rows]) for x in (gradients, firsts, seconds))
            adamw_(weight, part, (first, second), group, step)
            self.bf16.write(parameter, state, rows, weight, step)
            self.bf16.write_moment(parameter, state, "exp_avg", rows, first, step)
            self.bf16.write_moment(parameter, state, "exp_avg_sq", rows, second, step)


def adamw_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    group: dict[str, Any],
    step: float,
) -> None:
    """AdamW's update of a weight and its two moments in place, in fp32 or wider; `step` counts from 1."""
    (first, second), (beta1, beta2) = moments, group["betas"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / sqrt(1 - beta2**step)).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(first.to(weight.dtype), denominator.to(weight.dtype), value=-group["lr"] / (1 - beta1**step))
