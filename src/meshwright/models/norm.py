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

    mean_square: Callable[[torch.Tensor], torch.Tensor] | None = None
    """A slot: the mean of squares [..., 1] over a dim of which this is a part; None: this is the whole dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim."""
        return self._normed(x, self.view.read(self)["weight"])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.mean_square is None:
            return self.kernel(x, self.normalized_shape, weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return (wide * (self.mean_square(wide) + eps).rsqrt() * weight).to(x.dtype)

    def extra_repr(self) -> str:
        """The contents of the slot too."""
        spread = "" if self.mean_square is None else f"mean square: {self.mean_square}"
        return ", ".join(filter(None, (super().extra_repr(), spread)))


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that adds one to its weight, as Gemma's; in fp32 under bf16 and fp16, rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim."""
        exact = torch.promote_types(x.dtype, torch.float32)
        return self._normed(x.to(exact), 1 + self.view.read(self)["weight"].to(exact)).to(x.dtype)


def build_norm(spec: ModelSpec, width: int) -> nn.Module:
    """The model's norm over the last dim, of size `width`."""
    match spec.norm:
        case "layernorm":
            return LayerNorm(width, eps=spec.norm_eps)
        case "rmsnorm":
            return RMSNorm(width, eps=spec.norm_eps)
        case "offset_rmsnorm":
            return OffsetRMSNorm(width, eps=spec.norm_eps)
        case _:
            assert_never(spec.norm)
