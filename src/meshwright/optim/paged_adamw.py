"""AdamW whose moments the driver pages between GPU and host (Dettmers et al., "QLoRA", 2023)."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from meshwright.devices import on_cpu, synchronize_all
from meshwright.optim.adamw import ParameterwiseAdamW
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

SMALLEST_PAGED = 10**5
"""Moments with fewer numbers stay on the GPU."""


class PagedAdamW(ParameterwiseAdamW):
    """AdamW (Loshchilov and Hutter, 2019) in fp32 by bitsandbytes' kernel, with moments in CUDA's managed memory: pages
    that do not fit the GPU at its peak are moved to the host, and back for the step."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        """Raises `UserError` if bitsandbytes is not installed."""
        super().__init__(params, **settings)
        try:
            self._functional = import_module("bitsandbytes.functional")
        except ImportError as error:
            raise UserError(f"training.optimizer.name=paged_adamw needs bitsandbytes: {install('qlora')}") from error

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        super().step(closure)
        synchronize_all(self.param_groups[0]["params"])  # the driver moves pages while kernels run

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """One step of one parameter."""
        state["step"] += 1
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        for moment in moments:
            if getattr(moment, "is_paged", False):
                self._functional.prefetch_tensor(moment)
        (beta1, beta2), (first, second) = group["betas"], moments
        self._functional.optimizer_update_32bit(
            *("adam", gradient, parameter, first, beta1, group["eps"], int(state["step"]), group["lr"]),
            state2=second,
            beta2=beta2,
            weight_decay=group["weight_decay"],
        )

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step: moments are zero."""

        def zeros() -> torch.Tensor:
            if on_cpu(parameter) or parameter.numel() < SMALLEST_PAGED:
                return torch.zeros_like(parameter)
            paged = self._functional.get_paged(*parameter.shape, dtype=torch.float32, device=parameter.device)
            self._functional.fill(paged, 0)
            return paged

        return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": zeros(), "exp_avg_sq": zeros()}
