"""The feed-forward layer: gated, as SwiGLU and GeGLU (Shazeer, 2020), or not, as GPT-2's.

Shapes: B batch, T sequence, D hidden, F feed-forward width.
"""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.cpu_kernels import gelu_tanh, serves_training
from meshwright.models.linear import Linear
from meshwright.models.slots import Entry
from meshwright.spec.layers import ActivationName
from meshwright.spec.model import ModelSpec

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation(name: ActivationName) -> Activation:
    """The activation function, elementwise."""
    match name:
        case "silu":
            return F.silu
        case "gelu_tanh":
            return _gelu_tanh
        case "clamped_silu":
            raise AssertionError("it takes both projections: see `gate`")
        case _:
            assert_never(name)


def gate(name: ActivationName, spec: ModelSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What a gated layer computes of its two projections."""
    if name == "clamped_silu":
        return partial(_clamped_silu, spec.glu_alpha, spec.glu_limit)
    function = activation(name)
    return lambda x, up: function(x) * up


def _clamped_silu(alpha: float, limit: float, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    x = x.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (x * torch.sigmoid(alpha * x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu_tanh(x) if serves_training(x) else F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """`w2(activation(w1 x) * w3 x)`, or `w2(activation(w1 x))` without a gate.

    A slot: `entry`, applied to the input; a strategy whose ranks share the width fills it.
    """

    entry: Entry | None = None

    def __init__(self, spec: ModelSpec, width: int):
        super().__init__()
        self.w1 = Linear(spec.hidden, width, bias=spec.ffn_bias)
        self.w2 = Linear(width, spec.hidden, bias=spec.ffn_bias)
        self.w3 = Linear(spec.hidden, width, bias=spec.ffn_bias) if spec.gated else None
        self.activation = activation(spec.activation)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        h_BTF = self.activation(self.w1(x_BTD))
        return self.w2(h_BTF if self.w3 is None else h_BTF * self.w3(x_BTD))

    def extra_repr(self) -> str:
        """The contents of the slot."""
        return "" if self.entry is None else f"entry: {self.entry}"
