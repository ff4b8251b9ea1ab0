"""EMA: an exponential moving average of the weights, sharded like the weights."""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.optim.shards import local
from meshwright.spec.errors import UserError


class EMA(Callback):
    """Keeps a moving average of everything that trains, and measures it after every evaluation.

    After each step, `average += (1 - d) * (weights - average)` in the weights' own precision, with
    `d = min(decay, (1 + t) / (10 + t))` after t steps, so that the first weights are soon forgotten (Polyak and
    Juditsky, 1992; the warm-up is TensorFlow's). Every rank averages its own shards: memory for one more copy of them,
    and nothing is sent. Checkpoints keep the average; `generate`, `eval` and `export` take it with `--ema`.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True) -> None:
        """`decay` in [0, 1); `warmup`: start with a smaller decay."""
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise UserError(f"EMA: decay={decay!r} must be a number in [0, 1), as in 0.999")
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        """Steps averaged so far."""
        self.average: dict[str, torch.Tensor] = {}
        """Name -> average, plain or DTensor like the parameter; empty before the run begins."""

    def tensors(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Callback`: the averages, which start equal to the weights."""
        self.average = self.average or {name: tensor.detach().clone() for name, tensor in parameters.items()}
        return self.average

    def on_start(self, training: Training) -> None:
        """Start from the weights, unless a checkpoint has averages."""
        if not training.step:
            self.average, self.updates = {}, 0
        self.tensors(training.parameters)

    @torch.no_grad()
    def on_step(self, training: Training, record: Record) -> None:
        """Take the new weights in."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        for name, average in self.average.items():
            local(average).lerp_(local(training.parameters[name]), 1 - decay)

    def on_evaluate(self, training: Training, record: Record) -> None:
        """Measure the averaged weights on the same text."""
        with training.with_weights(self.average):
            losses = training.measure()
        if losses is not None:
            training.log("ema", **losses)
            training.say(f"step {training.step}  held-out loss {losses['loss']:.3f} with averaged weights")

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
