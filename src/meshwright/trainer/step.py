"""One optimizer step: microbatches in, weights updated or unchanged, one result out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.comm import collectives
from meshwright.comm.objects import total
from meshwright.data.loader import HostBatch
from meshwright.devices import widest
from meshwright.families import low_precision_state
from meshwright.models.batch import to_device
from meshwright.optim.balance import ExpertBalance
from meshwright.optim.clip import global_gradient_norm
from meshwright.optim.delayed_scaling import DelayedScaling
from meshwright.optim.loss_scale import LossScaler
from meshwright.optim.schedule import find_shape, lr_factor
from meshwright.optim.spikes import SpikeGuard
from meshwright.parallel import Passes
from meshwright.parallel.quantized import error_feedback
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.state import StateStore


class NonFiniteError(UserError):
    """A loss or gradient that is infinite or not a number, under the policy `raise`."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    loss: float
    """Mean loss over the terms of the global batch: trained tokens, pairs of answers."""
    gnorm: float | None
    """2-norm of the whole gradient before clipping; None if an asynchronous pipeline's first step has none."""
    trained: int
    """Terms of the global batch."""
    tokens: int
    """Tokens of the global batch that went through the model."""
    skipped: bool
    """Whether the weights were left unchanged."""
    spike: bool = False
    """Whether the reason was an outlier (`guards.spikes`), rather than a non-finite loss or gradient."""
    rewind: bool = False
    """Whether the recipe's policy is to return to the last checkpoint."""
    expert_load: float | None = None
    """See `trainer/metrics.py`."""


class TrainStep:
    """Forward, backward, clip, update: the same for every layout.

    The loss of each microbatch is divided by the number of terms of the whole global batch before the backward pass,
    and gradients are summed over microbatches and ranks, so every split of a batch has the same gradient.
    """

    def __init__(
        self, run: Run, passes: Passes, store: StateStore, device: torch.device, *, repeats_loss: bool = False
    ) -> None:
        """`repeats_loss`: another rank computes and counts the same share of the loss."""
        self.run, self.training = run, run.training
        self.passes, self.store, self.device = passes, store, device
        self.repeats_loss = repeats_loss or not passes.has_loss
        self.balance = ExpertBalance(passes.model, device)
        delayed = low_precision_state(passes.model.table, run.training)
        self.scaling = DelayedScaling(passes.model, sum(row.shape[0] for row in delayed), device)
        self.feedback = error_feedback(passes.model)
        self.scaler = LossScaler() if run.training.dtypes.scales_loss else None
        self.spikes = None if run.guards.spikes == "off" else SpikeGuard()
        self.shape = find_shape(run.training.lr_schedule)
        """The learning rate schedule after its warm-up."""
        self.left_out = 0
        """Consecutive steps skipped by the policy (`skip`)."""
        self.tokens = 0
        """Tokens of the last global batch that went through the model."""
        self._owed = False

    def __call__(self, step: int, microbatches: Sequence[HostBatch]) -> StepResult:
        """Make optimizer step `step` (the first is 1) with this rank's microbatches; collective.

        Raises `NonFiniteError` before the weights are touched, if the recipe's policy is `raise`.
        """
        has_gradient = self._owed or not self.passes.late
        loss_sum, trained = self.accumulate(microbatches)
        self._owed = self.passes.late
        # Read together: the host waits for the device once.
        loss, gnorm = torch.stack([loss_sum, self.norm() if has_gradient else loss_sum.new_zeros(())]).tolist()
        loss, gnorm = loss / trained, gnorm / self._scale
        finite = bool(np.isfinite(loss) and np.isfinite(gnorm))
        spike = finite and self.spikes is not None and self.spikes.is_spike(loss, gnorm)
        if finite and not spike and has_gradient:
            self.update(step, gnorm)
        elif has_gradient:
            self.feedback.drop()
        self.store.zero_grad()
        overflow = self.scaler is not None and np.isfinite(loss) and self._scale > 1
        policy = self.run.guards.spikes if spike else self.training.non_finite if not finite and not overflow else ""
        if policy == "raise":
            raise NonFiniteError(
                f"step {step}: loss {loss:.4g}, gradient norm {gnorm:.4g}; the weights are still those of step "
                f"{step - 1}. Lower training.optimizer.lr, or set training.non_finite=skip to skip such steps (or "
                "=rewind)"
            )
        self.left_out = self.left_out + 1 if policy == "skip" else 0
        if self.left_out > self.run.guards.max_skipped > 0:
            raise NonFiniteError(
                f"step {step}: the last {self.left_out} steps were skipped (loss {loss:.4g}, norm {gnorm:.4g}), "
                f"more than guards.max_skipped={self.run.guards.max_skipped}; lower training.optimizer.lr"
            )
        if self.scaler is not None:
            self.scaler.update(finite=finite)
        return StepResult(
            loss=loss,
            gnorm=gnorm if has_gradient else None,
            trained=trained,
            tokens=self.tokens,
            skipped=spike or not finite,
            spike=spike,
            rewind=policy == "rewind",
            expert_load=self.balance.load,
        )

    def finish(self, step: int) -> None:
        """Make the pending update of `late` passes for optimizer step `step`, before weights are saved or passed on.
        Collective."""
        if self._flush():
            gnorm = self.gradient_norm()
            if np.isfinite(gnorm):
                self.update(step, gnorm)
            self.store.zero_grad()

    def abandon(self) -> None:
        """Drop the pending update of `late` passes, before other weights are loaded. Collective."""
        self._flush()
        self.store.zero_grad()

    def _flush(self) -> bool:
        """Compute the pending gradient; returns whether there was one."""
        owed, self._owed = self._owed, False
        if owed:
            self.passes.flush()
        return owed

    @property
    def _scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def gradients(self, microbatches: Sequence[HostBatch]) -> tuple[float, int]:
        """Leave the gradient of the global batch's mean loss, times the loss scale, in `store`; collective.

        Returns that loss and the number of terms of the global batch.
        """
        loss_sum, trained = self.accumulate(microbatches)
        return loss_sum.item() / trained, trained

    def accumulate(self, microbatches: Sequence[HostBatch]) -> tuple[torch.Tensor, int]:
        """`gradients`, whose loss is still on the device: its sum over terms, 0-dim in fp64."""
        terms = sum(self.passes.count(microbatch) for microbatch in microbatches)
        tokens = sum(microbatch.tokens.size for microbatch in microbatches)
        terms, self.tokens = total(*((0, 0) if self.repeats_loss else (terms, tokens)))
        trained = max(1, terms)
        sequences = sum(len(microbatch.tokens) for microbatch in microbatches) * self.run.layout.data_parallel
        self.balance.begin(self._scale / sequences)
        self.scaling.begin()
        self.feedback.begin(self._scale)
        batches = [to_device(microbatch, self.device) for microbatch in microbatches]
        loss_sum = self.passes.train(batches, self._scale / trained).to(self.device)
        return self._sum_over_ranks(loss_sum), trained

    def gradient_norm(self) -> float:
        """The 2-norm of the whole unscaled gradient, the same on every rank; collective."""
        return self.norm().item() / self._scale

    def norm(self) -> torch.Tensor:
        """The 2-norm of the gradient in `store`, still on the device: 0-dim in its widest dtype."""
        counted = (tensor for name, tensor in self.store.each_parameter() if name not in self.passes.counted_elsewhere)
        return global_gradient_norm(counted, self.passes.stages, self.device).to(self.device, widest(self.device))

    def update(self, step: int, gnorm: float, lr: float | None = None) -> None:
        """Clip and make one optimizer step with the gradients in `store`, whose unscaled norm is `gnorm`.

        `lr`: its factor of the peak learning rate (default: the schedule's).
        """
        self.store.step(self.lr_factor(step) if lr is None else lr, self.gradient_factor(gnorm))
        self.balance.update()
        self.scaling.update()

    def gradient_factor(self, gnorm: float) -> float:
        """The factor of the gradients in `store`, whose unscaled norm is `gnorm`, before the optimizer: it removes the
        loss scale and clips."""
        factor = 1 / self._scale
        if self.training.clip is not None and gnorm > self.training.clip:
            factor *= self.training.clip / gnorm
        return factor

    def lr_factor(self, step: int) -> float:
        """Factor of the peak learning rate at `step`."""
        return lr_factor(self.training.lr_schedule, step, self.training.steps, self.shape)

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, each share counted once."""
        if self.repeats_loss:
            value.zero_()
        return collectives.all_reduce_(value)
