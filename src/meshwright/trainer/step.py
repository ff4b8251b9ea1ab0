"""The one place where an optimizer step happens: microbatches in, weights changed or left alone, one result out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from meshwright.models.loss import IGNORED
from meshwright.optim.build import Optimizers
from meshwright.optim.clip import global_gradient_norm, scale_gradients
from meshwright.optim.loss_scale import LossScaler
from meshwright.optim.schedule import lr_factor
from meshwright.parallel import set_gradient_sync
from meshwright.parallel.precision import MasterWeights
from meshwright.spec.run import Run

Microbatch = tuple[np.ndarray, np.ndarray]
"""inputs_bT and labels_bT, int64."""


class NonFiniteError(ValueError):
    """A loss or gradient that is infinite or not a number, under the policy `raise`."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw, the same on every rank."""

    loss: float
    """Mean loss per trained token over the global batch, in nats."""
    gnorm: float
    """2-norm of the whole gradient before clipping."""
    trained: int
    """Tokens of the global batch that carry loss."""
    skipped: bool
    """Whether the weights were left alone because loss or gradient were not finite."""


class TrainStep:
    """Forward, backward, clip, update: the same for every layout.

    The loss of each microbatch is divided by the number of trained tokens of the whole global batch before the backward
    pass, and gradients are summed over microbatches and ranks, so every split of a batch has the same gradient.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        parameters: dict[str, torch.Tensor],
        optimizers: Optimizers,
        masters: MasterWeights | None,
        device: torch.device,
    ) -> None:
        self.run, self.training = run, run.training
        self.model, self.parameters, self.optimizers, self.masters = model, parameters, optimizers, masters
        self.device = device
        self.scaler = LossScaler() if run.training.precision == "fp16" else None

    def __call__(self, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Make optimizer step `step` (the first is 1) on this rank's microbatches; collective.

        Raises `NonFiniteError` before the weights are touched, where the recipe's policy is `raise`.
        """
        trained = self._sum_over_ranks(sum(int((labels != IGNORED).sum()) for _, labels in microbatches), torch.int64)
        loss_sum = self._forward_backward(microbatches, max(1, int(trained)))
        loss = self._sum_over_ranks(loss_sum, torch.float64).item() / max(1, int(trained))
        gnorm = global_gradient_norm(self.parameters.values()).item() / self._scale
        finite = bool(np.isfinite(loss) and np.isfinite(gnorm))
        if finite:
            self._update(step, gnorm)
        self.optimizers.zero_grad()
        overflow = self.scaler is not None and np.isfinite(loss) and self._scale > 1
        if not finite and not overflow and self.training.non_finite == "raise":
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {gnorm}; the weights are those of step {step - 1}. "
                "Lower training.optimizer.lr, or set training.non_finite=skip to leave such steps out"
            )
        if self.scaler is not None:
            self.scaler.update(finite=finite)
        return StepResult(loss=loss, gnorm=gnorm, trained=int(trained), skipped=not finite)

    @property
    def _scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def _forward_backward(self, microbatches: Sequence[Microbatch], trained: int) -> torch.Tensor:
        """Accumulate gradients; returns the sum of this rank's token losses."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, (inputs, labels) in enumerate(microbatches):
            set_gradient_sync(self.model, self.run.layout, last_microbatch=index == len(microbatches) - 1)
            loss_sum = self.model(*to_device((inputs, labels), self.device))
            (loss_sum * (self._scale / trained)).backward()
            total += loss_sum.detach()
        return total

    def _update(self, step: int, gnorm: float) -> None:
        factor = 1 / self._scale
        if self.training.clip is not None and gnorm > self.training.clip:
            factor *= self.training.clip / gnorm
        if factor != 1:
            scale_gradients(self.parameters.values(), factor)
        self.optimizers.set_lr(self.lr_factor(step))
        self.optimizers.step()
        if self.masters is not None:
            self.masters.refresh()

    def lr_factor(self, step: int) -> float:
        """Factor of the peak learning rate at `step`."""
        return lr_factor(self.training.lr_schedule, step, self.training.steps)

    def _sum_over_ranks(self, value: torch.Tensor | int, dtype: torch.dtype) -> torch.Tensor:
        """Sum over all ranks, each of which reads different data."""
        total = torch.as_tensor(value, dtype=dtype, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total


def to_device(microbatch: Microbatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs_bT and labels_bT as int64 tensors on `device`; copies to a GPU do not block."""
    tensors = tuple(torch.from_numpy(array) for array in microbatch)
    if device.type == "cuda":
        return tensors[0].pin_memory().to(device, non_blocking=True), tensors[1].pin_memory().to(device, non_blocking=True)
    return tensors[0], tensors[1]
