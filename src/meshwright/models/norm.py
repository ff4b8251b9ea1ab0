"""Normalisation: LayerNorm (Ba et al., 2016) and RMSNorm (Zhang and Sennrich, 2019).

Both compute in fp32 under bf16 and fp16, and in the input's dtype otherwise.
"""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.slots import Viewed
from meshwright.spec.model import ModelSpec


class LayerNorm(Viewed, nn.LayerNorm):
    """`nn.LayerNorm` that reads its parameters through a view."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim."""
        weights = self.view.read(self)
        return F.layer_norm(input, self.normalized_shape, weights["weight"], weights["bias"], self.eps)


class RMSNorm(Viewed, nn.RMSNorm):
    """`nn.RMSNorm` that reads its parameters through a view."""

    kernel: Callable[..., torch.Tensor] = staticmethod(F.rms_norm)
    """A slot: the function of input, shape, weight and eps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim."""
        return self.kernel(x, self.normalized_shape, self.view.read(self)["weight"], self.eps)


def build_norm(spec: ModelSpec, width: int) -> nn.Module:
    """The model's norm over the last dim, of size `width`."""
    match spec.norm:
        case "layernorm":
            return LayerNorm(width, eps=spec.norm_eps)
        case "rmsnorm":
            return RMSNorm(width, eps=spec.norm_eps)
        case _:
            assert_never(spec.norm)
