"""The feed-forward layer: SwiGLU (Shazeer, 2020) or GPT-2's GELU.

Shapes: B batch, T sequence, D hidden, F feed-forward width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.cpu_kernels import gelu_tanh, serves_training
from meshwright.models.linear import Linear
from meshwright.models.slots import Entry
from meshwright.spec.model import ModelSpec


class FeedForward(nn.Module):
    """`w2(silu(w1 x) * w3 x)`, or `w2(gelu(w1 x))` with the tanh approximation.

    A slot: `entry`, applied to the input; a strategy whose ranks share the width fills it.
    """

    entry: Entry | None = None

    def __init__(self, spec: ModelSpec, width: int):
        super().__init__()
        self.w1 = Linear(spec.hidden, width, bias=spec.ffn_bias)
        self.w2 = Linear(width, spec.hidden, bias=spec.ffn_bias)
        self.w3 = Linear(spec.hidden, width, bias=spec.ffn_bias) if spec.activation == "swiglu" else None

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        if self.w3 is None:
            h_BTF = self.w1(x_BTD)
            return self.w2(gelu_tanh(h_BTF) if serves_training(h_BTF) else F.gelu(h_BTF, approximate="tanh"))
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))

    def extra_repr(self) -> str:
        """The contents of the slot."""
        return "" if self.entry is None else f"entry: {self.entry}"
