"""AdamW with weights or moments in bf16."""

from typing import Any

import torch

from meshwright.optim.bf16 import as_rows, widened
from meshwright.optim.parameterwise import ParameterwiseAdamW, adamw_


class AdamWBf16(ParameterwiseAdamW):
    """AdamW, computed in fp32, with weights, moments or both in bf16 (`optim/bf16.py`), a few rows at a time."""

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
        step = int(state["step"].item())
        gradients, firsts, seconds = (as_rows(x) for x in (gradient, state["exp_avg"], state["exp_avg_sq"]))
        for rows in self.bf16.parts(parameter):
            weight = self.bf16.read(parameter, state, rows)
            part, first, second = (widened(x[rows]) for x in (gradients, firsts, seconds))
            adamw_(weight, part, (first, second), group, step)
            self.bf16.write(parameter, state, rows, weight, step)
            self.bf16.write_moment(parameter, state, "exp_avg", rows, first, step)
            self.bf16.write_moment(parameter, state, "exp_avg_sq", rows, second, step)
