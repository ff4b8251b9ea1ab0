"""The one place where an optimizer step happens: microbatches in, weights changed or left alone, one result out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.loader import Microbatch
from meshwright.models.loss import IGNORED
from meshwright.models.preference import PreferenceLoss
from meshwright.optim.balance import ExpertBalance
from meshwright.optim.build import Optimizers
from meshwright.optim.clip import global_gradient_norm, scale_gradients
from meshwright.optim.loss_scale import LossScaler
from meshwright.optim.schedule import lr_factor
from meshwright.optim.spikes import SpikeGuard
from meshwright.parallel import Passes
from meshwright.parallel.precision import MasterWeights
from meshwright.spec.run import Run


class NonFiniteError(ValueError):
    """A loss or gradient that is infinite or not a number, under the policy `raise`."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw, the same on every rank."""

    loss: float
    """Mean loss over the global batch, in nats: per trained token, or per pair of answers."""
    gnorm: float
    """2-norm of the whole gradient before clipping; 0 where an asynchronous pipeline's first step has none."""
    trained: int
    """Tokens of the global batch that carry loss, or pairs of answers."""
    tokens: int
    """Tokens of the global batch that went through the model."""
    skipped: bool
    """Whether the weights were left alone."""
    spike: bool = False
    """Whether that was because of an outlier (`guards.spikes`), not because loss or gradient were not finite."""
    rewind: bool = False
    """Whether the recipe's policy is to go back to the last checkpoint."""
    expert_load: float | None = None
    """See `trainer/metrics.py`."""


class TrainStep:
    """Forward, backward, clip, update: the same for every layout.

    The loss of each microbatch is divided by the number of trained tokens of the whole global batch before the backward
    pass, and gradients are summed over microbatches and ranks, so every split of a batch has the same gradient.
    """

    def __init__(
        self,
        run: Run,
        passes: Passes,
        parameters: dict[str, torch.Tensor],
        optimizers: Optimizers,
        masters: MasterWeights | None,
        device: torch.device,
        *,
        repeats_loss: bool = False,
    ) -> None:
        """`repeats_loss`: another rank computes the same share of the loss as this one, and counts it."""
        self.run, self.training = run, run.training
        self.passes, self.parameters, self.optimizers, self.masters = passes, parameters, optimizers, masters
        self.device, self.repeats_loss = device, repeats_loss or not passes.has_loss
        self.balance = ExpertBalance(passes.model, device)
        self.scaler = LossScaler() if run.training.precision == "fp16" else None
        self.spikes = None if run.guards.spikes == "off" else SpikeGuard()
        self.tokens = 0
        """Tokens of the last global batch that went through the model."""

    def __call__(self, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Make optimizer step `step` (the first is 1) on this rank's microbatches; collective.

        Raises `NonFiniteError` before the weights are touched, where the recipe's policy is `raise`.
        """
        loss, trained = self.gradients(microbatches)
        gnorm = self.gradient_norm() if self.passes.has_gradient else 0.0
        finite = bool(np.isfinite(loss) and np.isfinite(gnorm))
        spike = finite and self.spikes is not None and self.spikes.is_spike(loss, gnorm)
        if finite and not spike and self.passes.has_gradient:
            self.update(step, gnorm)
        self.optimizers.zero_grad()
        overflow = self.scaler is not None and np.isfinite(loss) and self._scale > 1
        policy = self.run.guards.spikes if spike else self.training.non_finite if not finite and not overflow else ""
        if policy == "raise":
            raise NonFiniteError(
                f"step {step}: loss {loss:.4g}, gradient norm {gnorm:.4g}; the weights are those of step {step - 1}. "
                "Lower training.optimizer.lr, or set training.non_finite=skip to leave such steps out (or =rewind)"
            )
        if self.scaler is not None:
            self.scaler.update(finite=finite)
        return StepResult(
            loss=loss,
            gnorm=gnorm,
            trained=trained,
            tokens=self.tokens,
            skipped=spike or not finite,
            spike=spike,
            rewind=policy == "rewind",
            expert_load=self.balance.load,
        )

    def finish(self, step: int) -> None:
        """Make the update that an asynchronous pipeline still owes to optimizer step `step`, before weights are saved
        or handed on; nothing elsewhere. Collective."""
        if self.passes.drain():
            gnorm = self.gradient_norm()
            if np.isfinite(gnorm):
                self.update(step, gnorm)
            self.optimizers.zero_grad()

    def abandon(self) -> None:
        """Drop what an asynchronous pipeline owes, before other weights are loaded; nothing elsewhere. Collective."""
        self.passes.drain()
        self.optimizers.zero_grad()

    @property
    def _scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def gradients(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """Leave the gradient of the global batch's mean loss, times the loss scale, in `parameters`; collective.

        Returns that loss and the number of tokens of the global batch that carry loss.
        """
        terms = sum(count_terms(microbatch, self.passes.model) for microbatch in microbatches)
        tokens = sum(microbatch.inputs.size for microbatch in microbatches)
        counts = self._sum_over_ranks(torch.tensor((terms, tokens), device=self.device)).tolist()
        trained, self.tokens = max(1, counts[0]), counts[1]
        sequences = sum(len(microbatch.inputs) for microbatch in microbatches) * self.run.layout.data_parallel
        self.balance.begin(self._scale / sequences)
        arguments = [to_device(microbatch, self.device) for microbatch in microbatches]
        loss_sum = self.passes.backward(arguments, self._scale / trained).to(self.device)
        return self._sum_over_ranks(loss_sum).item() / trained, trained

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, the loss scale taken out, the same on every rank; collective."""
        counted = [tensor for name, tensor in self.parameters.items() if name not in self.passes.counted_elsewhere]
        return global_gradient_norm(counted, self.passes.stages, self.device).item() / self._scale

    def update(self, step: int, gnorm: float) -> None:
        """Clip and make one optimizer step with the gradients in `parameters`, whose unscaled norm is `gnorm`."""
        factor = 1 / self._scale
        if self.training.clip is not None and gnorm > self.training.clip:
            factor *= self.training.clip / gnorm
        if factor != 1:
            scale_gradients(self.parameters.values(), factor)
        self.optimizers.set_lr(self.lr_factor(step))
        self.optimizers.step()
        self.balance.update()
        if self.masters is not None:
            self.masters.refresh()

    def lr_factor(self, step: int) -> float:
        """Factor of the peak learning rate at `step`."""
        return lr_factor(self.training.lr_schedule, step, self.training.steps)

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, each share counted once."""
        if self.repeats_loss:
            value.zero_()
        if dist.is_initialized():
            dist.all_reduce(value)
        return value


def count_terms(microbatch: Microbatch, model: nn.Module) -> int:
    """How many terms of the loss are counted on this rank, whose mean over the global batch it is: labels, or pairs."""
    if microbatch.references is None:
        return int((microbatch.labels != IGNORED).sum())
    preference = preference_of(model)
    assert preference is not None
    return int((~np.isnan(microbatch.references)).sum()) if preference.counts else 0


def preference_of(model: nn.Module) -> PreferenceLoss | None:
    """The loss of pairs of answers, where the run learns from such."""
    found = model.preference
    assert found is None or isinstance(found, PreferenceLoss)
    return found


def to_device(microbatch: Microbatch, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """The model's first arguments on `device`, those of a `Microbatch`, or None; copies to a GPU do not block."""
    tensors = (None if array is None else torch.from_numpy(array) for array in microbatch)
    if device.type != "cuda":
        return tuple(tensors)
    return tuple(None if x is None else x.pin_memory().to(device, non_blocking=True) for x in tensors)
