"""The base of this project's optimizers, which update one parameter at a time from state that can be allocated before
the first step.
"""

from abc import abstractmethod
from typing import Any

import torch

from meshwright.optim.bf16 import Bf16


def steps_done() -> torch.Tensor:
    """A count of steps, in host memory whatever the parameter's device: reading it does not wait for the device."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def next_step(state: dict[str, torch.Tensor]) -> int:
    """Count another step; its number, from 1."""
    state["step"] += 1
    return int(state["step"].item())


class Parameterwise(torch.optim.Optimizer):
    """An optimizer defined by the initial state and the update of one parameter."""

    bf16: Bf16 = Bf16()
    """How it stores bf16 weights and moments; `build_optimizers` gives each optimizer the run's settings."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.fresh_state(parameter)
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    @abstractmethod
    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, sharded like the parameter."""

    @abstractmethod
    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Change a parameter and its state in place; `group` has the settings of its parameter group."""
