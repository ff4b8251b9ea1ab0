"""Adapters that fine-tuning adds to a layer: low-rank products, magnitudes, factors.

An adapter is an op around the layer's product, of any kind. Its parameters are registered in the layer.

Shapes: B batch, T sequence, D in, N out, R rank, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwright.models.cpu_kernels import linear
from meshwright.models.dropout import Dropout
from meshwright.models.slots import Op, OpPosition, Weights, unreduced


class Lora(Op):
    """A linear layer's low-rank adapter (Hu et al., "LoRA", 2021): W x + b + scale B A x, by `lora_a` [R, D] and
    `lora_b` [N, R].

    With a `magnitude` m [N] each row of W + scale B A is scaled to norm m (Liu et al., "DoRA", 2024); the backward pass
    treats the row's own norm as a constant, as in section 4.3 there.
    """

    place = OpPosition.ADAPTER

    def __init__(self, scale: float, dropout: Dropout | None = None) -> None:
        """`dropout` is a submodule of the layer, so that it knows whether the layer trains."""
        self.scale, self.dropout = scale, dropout
        self.sum_over_inputs: Callable[[torch.Tensor], torch.Tensor] = unreduced
        """Reduces the sums of squares [N] over this rank's inputs to sums over all inputs."""

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        dropped = x if self.dropout is None else self.dropout(x)
        added = linear(linear(dropped, weights["lora_a"]), weights["lora_b"] * self.scale)
        base = self.inner.forward(x, weights)
        magnitude_N, bias_N = weights.get("magnitude"), weights.get("bias")
        if magnitude_N is None:
            return base + added
        factor_N = magnitude_N / self.row_norms(weights)
        unbiased = base if bias_N is None else base - bias_N
        return base + (factor_N - 1) * unbiased + factor_N * added

    @torch.no_grad()
    def row_norms(self, weights: Weights) -> torch.Tensor:
        """The norm [N] of every row of W + scale B A."""
        weight_ND = self._sum(weights)
        wide = torch.promote_types(weight_ND.dtype, torch.float32)
        squares_N = torch.linalg.vector_norm(weight_ND, dim=1, dtype=wide).square()
        return self.sum_over_inputs(squares_N).sqrt().to(weight_ND.dtype)

    def merged(self, weights: Weights) -> Weights:
        """The parameters of an equivalent layer without adapter."""
        weight_ND, magnitude_N = self._sum(weights), weights.get("magnitude")
        if magnitude_N is not None:
            weight_ND = weight_ND * (magnitude_N / self.row_norms(weights)).unsqueeze(1)
        return {**self.inner.merged(weights), "weight": weight_ND}

    def _sum(self, weights: Weights) -> torch.Tensor:
        """W + scale B A."""
        weight_ND = self.inner.merged(weights)["weight"]
        return torch.addmm(weight_ND, weights["lora_b"], weights["lora_a"], alpha=self.scale)

    def __repr__(self) -> str:
        return f"LoRA of scale {self.scale:g}"


class LoraRows(Op):
    """An embedding's low-rank adapter: the row of W and scale B a, with a the token's row of A; `lora_a` [V, R] and
    `lora_b` [D, R]."""

    place = OpPosition.ADAPTER

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Tokens [B, T] to [B, T, D]."""
        added_BTD = linear(F.embedding(x, weights["lora_a"]), weights["lora_b"] * self.scale)
        return self.inner.forward(x, weights) + added_BTD

    def merged(self, weights: Weights) -> Weights:
        """The parameters of an equivalent embedding without adapter."""
        weight_VD = self.inner.merged(weights)["weight"]
        return {"weight": torch.addmm(weight_VD, weights["lora_a"], weights["lora_b"].t(), alpha=self.scale)}

    def __repr__(self) -> str:
        return f"LoRA of scale {self.scale:g}"


class Scaled(Op):
    """A factor for each output of a linear layer, or for each input (Liu et al., "IA3", 2022): `factors` [N], or
    [D]."""

    place = OpPosition.ADAPTER

    def __init__(self, *, scales_input: bool) -> None:
        self.scales_input = scales_input

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        factors = weights["factors"]
        if self.scales_input:
            return self.inner.forward(x * factors, weights)
        return self.inner.forward(x, weights) * factors

    def merged(self, weights: Weights) -> Weights:
        """The parameters of an equivalent layer without adapter."""
        plain, factors = self.inner.merged(weights), weights["factors"]
        if self.scales_input:
            return {**plain, "weight": plain["weight"] * factors}
        biases = {} if plain.get("bias") is None else {"bias": plain["bias"] * factors}
        return {"weight": plain["weight"] * factors.unsqueeze(1), **biases}

    def __repr__(self) -> str:
        return f"IA3 of {'inputs' if self.scales_input else 'outputs'}"
