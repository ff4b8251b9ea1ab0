"""Muon: orthogonalized momentum for hidden matrices (Jordan et al., "Muon", 2024)."""

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.optim.bf16 import widened
from meshwright.optim.parameterwise import Parameterwise, next_step, steps_done
from meshwright.optim.shards import local, part_like, whole
from meshwright.spec.errors import UserError

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, from the paper's reference implementation."""
NEWTON_SCHULZ_STEPS = 5


class Muon(Parameterwise):
    """Nesterov momentum, orthogonalised by five Newton-Schulz iterations; decoupled weight decay.

    Takes matrices only. A sharded matrix keeps its momentum sharded and is gathered for the iteration, so every layout
    computes the same update. The step is `lr * sqrt(max(1, rows / columns))`.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise UserError(f"Muon supports only matrices, not a tensor of shape {tuple(parameter.shape)}")

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """No momentum; a count of steps if anything is in bf16, whose rounding depends on it."""
        state = {"momentum_buffer": self.bf16.fresh_moment(parameter), **self.bf16.fresh(parameter)}
        if torch.bfloat16 in (parameter.dtype, state["momentum_buffer"].dtype):
            state["step"] = steps_done()
        return state

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """One step of one matrix."""
        step, every = next_step(state) if "step" in state else 0, slice(None)
        gradient, buffer = widened(local(gradient)), widened(local(state["momentum_buffer"]))
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"])
        update = part_like(orthogonalise(whole(parameter, update), NEWTON_SCHULZ_STEPS), parameter)
        self.bf16.write_moment(parameter, state, "momentum_buffer", every, buffer, step)
        rows, columns = parameter.shape
        weight = self.bf16.read(parameter, state, every)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
        self.bf16.write(parameter, state, every, weight, step)


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly (singular values in about [0.7, 1.2]), in the dtype of `matrix`.

    Iterates in bf16 on GPUs, as published, and in the matrix's own dtype on CPUs, where proofs run.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)
