"""The one place that computes what adapters add to a layer: low-rank products, magnitudes, factors.

An adapter extends the class of the layer that it is added to, whatever that is, so the layer's own parameters keep
their names and what it computes.

Shapes: B batch, T sequence, D in, N out, R rank, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.cpu_kernels import linear


@runtime_checkable
class Mergeable(Protocol):
    """A layer that computes with more than its weight."""

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a plain layer that computes the same."""
        ...


class LoraLinear(nn.Linear):
    """A linear layer and its low-rank adapter (Hu et al., "LoRA", 2021): W x + b + scale B A x.

    With a `magnitude` m each row of W + scale B A is brought to the length m (Liu et al., "DoRA", 2024); the row's own
    length counts as a constant in the backward pass, as in section 4.3 there.
    """

    lora_a: nn.Parameter
    """[R, D]"""
    lora_b: nn.Parameter
    """[N, R]"""
    magnitude: nn.Parameter | None
    """[N]"""
    scale: float
    dropout: float
    complete: Callable[[torch.Tensor], torch.Tensor]
    """Makes of the sums of squares [N] over the inputs that are here those over all; a strategy that splits the inputs
    replaces it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., N]."""
        x = F.dropout(input, self.dropout, self.training) if self.dropout else input
        added = linear(linear(x, self.lora_a), self.lora_b * self.scale)
        if self.magnitude is None:
            return super().forward(input) + added
        factor_N = self.magnitude / self.row_norms()
        base = super().forward(input)
        unbiased = base if self.bias is None else base - self.bias
        return base + (factor_N - 1) * unbiased + factor_N * added

    @torch.no_grad()
    def row_norms(self) -> torch.Tensor:
        """The length [N] of every row of W + scale B A."""
        weight_ND = torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scale)
        wide = torch.promote_types(weight_ND.dtype, torch.float32)
        squares_N = torch.linalg.vector_norm(weight_ND, dim=1, dtype=wide).square()
        return self.complete(squares_N).sqrt().to(weight_ND.dtype)

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a layer without adapter that computes the same."""
        weight_ND = torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scale)
        if self.magnitude is not None:
            weight_ND = weight_ND * (self.magnitude / self.row_norms()).unsqueeze(1)
        return {"weight": weight_ND}


class LoraEmbedding(nn.Embedding):
    """An embedding and its low-rank adapter: the row of W and scale B a, with a the token's row of A."""

    lora_a: nn.Parameter
    """[V, R]"""
    lora_b: nn.Parameter
    """[D, R]"""
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] to [B, T, D]."""
        added_BTD = linear(F.embedding(input, self.lora_a), self.lora_b * self.scale)
        return F.embedding(input, self.weight) + added_BTD

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of an embedding without adapter that computes the same."""
        return {"weight": torch.addmm(self.weight, self.lora_a, self.lora_b.t(), alpha=self.scale)}


class ScaledLinear(nn.Linear):
    """A linear layer with a factor for each output, or for each input (Liu et al., "IA3", 2022)."""

    factors: nn.Parameter
    """[N], or [D]"""
    scales_input: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., N]."""
        if self.scales_input:
            return super().forward(input * self.factors)
        return super().forward(input) * self.factors

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a layer without adapter that computes the same."""
        if self.scales_input:
            return {"weight": self.weight * self.factors}
        biases = {} if self.bias is None else {"bias": self.bias * self.factors}
        return {"weight": self.weight * self.factors.unsqueeze(1), **biases}


@functools.cache
def _extended(cls: type[nn.Module], adapter: type[nn.Module]) -> type[nn.Module]:
    return type(f"{adapter.__name__}Of{cls.__name__}", (adapter, cls), {})


def extend(module: nn.Module, adapter: type[nn.Module], **attributes: Any) -> None:
    """Add an adapter to `module` in place: `attributes` are its parameters, in their order, and its settings."""
    module.__class__ = _extended(type(module), adapter)
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            setattr(module, name, value)


def unchanged(squares_N: torch.Tensor) -> torch.Tensor:
    """What `LoraLinear.complete` is where all inputs are here."""
    return squares_N
