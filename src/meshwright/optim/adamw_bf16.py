"""AdamW with weights or moments in bf16."""

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch

from meshwright.optim.bf16 import as_rows, widened
from meshwright.optim.parameterwise import Parameterwise


class AdamWBf16(Parameterwise):
    """AdamW (Loshchilov and Hutter, 2019), computed in fp32, with weights, moments or both in bf16 (`optim/bf16.py`). A
    few rows are cast to fp32 at a time."""

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, sharded like the parameter: moments are zero."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": self.bf16.fresh_moment(parameter),
            "exp_avg_sq": self.bf16.fresh_moment(parameter),
            **self.bf16.fresh(parameter),
        }

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """One step of one parameter."""
        state["step"] += 1
        (beta1, beta2), step = group["betas"], int(state["step"].item())
        gradients, firsts, seconds = (as_rows(x) for x in (gradient, state["exp_avg"], state["exp_avg_sq"]))
        for rows in self.bf16.parts(parameter):
            weight = self.bf16.read(parameter, state, rows)
            part, first, second = (widened(x[rows]) for x in (gradients, firsts, seconds))
            first.mul_(beta1).add_(part, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(part, part, value=1 - beta2)
            denominator = (second.sqrt() / sqrt(1 - beta2**step)).add_(group["eps"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))
            self.bf16.write(parameter, state, rows, weight, step)
            self.bf16.write_moment(parameter, state, "exp_avg", rows, first, step)
            self.bf16.write_moment(parameter, state, "exp_avg_sq", rows, second, step)
