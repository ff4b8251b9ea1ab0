"""Linear layers whose three products take quantized operands: fp8, MXFP8 and NVFP4, by published recipes.

    output          x   W^T    sums over inputs
    input gradient  g   W      sums over outputs
    weight gradient g^T x      sums over tokens

Each product quantizes its operands along the dim that it sums over, multiplies them with accumulation in fp32 and
rounds the result to the dtype of its inputs. If the device has a kernel (`has_kernel`), it multiplies the codes;
elsewhere the dequantized operands are multiplied in fp32: the same numbers on any device.

A recipe's scales belong to whole matrices, however they are split. A strategy whose ranks share the tokens of a
microbatch, the inputs or the outputs of a layer sets in `LowPrecision.over` how a maximum is reduced over all of them.

Shapes: M rows (tokens of a microbatch), D in, N out; K kept and S summed over by a product.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.devices import capability_of, on_cpu
from meshwright.models.cpu_kernels import linear, matmul
from meshwright.models.dropout import Draws, drawn_bits, hash_key
from meshwright.models.linear import Kept, Product
from meshwright.models.scaling import (
    E2M1,
    E4M3,
    E5M2,
    HADAMARD,
    Encoded,
    Scaling,
    Spread,
    Uniform,
    delayed_scale,
    encode,
)
from meshwright.models.slots import Weights, unreduced
from meshwright.spec.low_precision import KERNELS
from meshwright.torch_internals import version_of

Dim = Literal["tokens", "in", "out"]
Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
T = TypeVar("T")
Pair = tuple[Scaling, Scaling]
"""The scalings of a product's operands, the one with the result's rows first."""

KERNEL_CAPABILITY = (8, 9)
"""The lowest compute capability with kernels in fp8; PyTorch's pull request 144348 brought them for rowwise scales."""
KERNEL_SIZES = 16
"""K and S must be multiples of these for a kernel."""


@dataclass(frozen=True)
class Recipe:
    """How the operands of a layer's products are quantized."""

    name: str
    forward: Pair
    """The scalings of input and weight."""
    input_gradient: Pair
    """The scalings of gradient and weight."""
    weight_gradient: Pair | None
    """The scalings of gradient and input; None: this product is in the layer's dtype."""
    four_bits: bool = False
    """Weight gradients' operands go through a random Hadamard transform, and gradients are rounded stochastically."""

    @property
    def reads_codes(self) -> bool:
        """Whether the weight's gradient scales the input as the forward pass does, with one scale."""
        one = self.forward[0]
        whole = one.rows is None and one.columns is None
        return whole and self.weight_gradient is not None and one == self.weight_gradient[1]

    @property
    def delayed(self) -> bool:
        """Whether scales come from the largest values of earlier steps."""
        return self.forward[0].scale == "delayed"


def _alike(name: str, one: Scaling, weight: Scaling) -> Recipe:
    """A recipe with the same scaling for inputs and gradients."""
    return Recipe(name, (one, weight), (one, weight), (one, one))


_TENSOR, _GRADIENTS = Scaling(E4M3, None, None), Scaling(E5M2, None, None)
_ROWS = Scaling(E4M3, 1, None, "power_of_two")
_TILES, _BLOCK = Scaling(E4M3, 1, 128), Scaling(E4M3, 128, 128)
_PAST = replace(_TENSOR, scale="delayed")
_PAST_GRADIENTS = replace(_GRADIENTS, scale="delayed")
_MX, _FOUR = Scaling(E4M3, 1, 32, "e8m0"), Scaling(E2M1, 1, 16, "nvfp4")

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", (_TENSOR, _TENSOR), (_GRADIENTS, _TENSOR), (_GRADIENTS, _TENSOR)),
        _alike("rowwise", _ROWS, _ROWS),
        Recipe("rowwise_with_gw_hp", (_ROWS, _ROWS), (_ROWS, replace(_TENSOR, scale="power_of_two")), None),
        _alike("blockwise", _TILES, _BLOCK),
        Recipe("delayed", (_PAST, _PAST), (_PAST_GRADIENTS, _PAST), (_PAST_GRADIENTS, _PAST)),
        _alike("mxfp8", _MX, _MX),
        replace(_alike("nvfp4", _FOUR, replace(_FOUR, rows=16)), four_bits=True),
    )
}


class AmaxHistory(nn.Module):
    """The largest absolute values of a layer's input, weight and gradient in the last steps, or of every expert's:
    state for delayed scales. R = 3 rows, or 3 for every expert."""

    amax_history: torch.Tensor
    """fp32 [R, H], the newest first; 0 for missing steps."""
    current: torch.Tensor
    """fp32 [R]: of the current step, on this rank."""

    def __init__(self, steps: int, margin: int, place: int, matrices: int = 1) -> None:
        """`steps`: H; `place`: the index of the first row among all layers' rows, on any rank; `matrices`: of the
        layer."""
        super().__init__()
        self.margin, self.place = margin, place
        self.register_buffer("amax_history", torch.zeros(matrices * len(ROLES), steps, device="meta"))
        self.register_buffer("current", torch.zeros(matrices * len(ROLES), device="meta"), persistent=False)

    @torch.no_grad()
    def turn(self, amax_R: torch.Tensor) -> None:
        """Start the next step; `amax` [R] are this step's values over all ranks. Non-finite ones are not recorded."""
        newest_R1 = amax_R.where(amax_R.isfinite(), self.amax_history[:, 0])[:, None]
        self.amax_history.copy_(torch.cat([newest_R1, self.amax_history[:, :-1]], 1))


@dataclass(frozen=True)
class Past:
    """The part of a history that one matrix's products read and record."""

    history: AmaxHistory
    matrix: int = 0

    def scale(self, role: Role, scaling: Scaling) -> torch.Tensor:
        """The current scale of this kind of operand."""
        row = self.matrix * len(ROLES) + ROLES.index(role)
        return delayed_scale(self.history.amax_history[row].amax(), scaling.format, self.history.margin)

    @torch.no_grad()
    def see(self, role: Role, tensor: torch.Tensor) -> None:
        """Record the largest value, in training only; recording a tensor twice changes nothing."""
        if self.history.training:
            seen = self.history.current[self.matrix * len(ROLES) + ROLES.index(role)]
            seen.copy_(torch.maximum(seen, tensor.abs().amax().float()))


class LastEncoded(Generic[T]):
    """The codes of the last input, for consecutive layers with the same input: quantized and saved once."""

    def __init__(self, readers: int) -> None:
        """`readers`: number of layers with the same input. The last of them drops the codes; autograd may have saved
        them."""
        self.readers, self._reads = readers, 0
        self._of: tuple[weakref.ref[torch.Tensor], int, T] | None = None

    def of(self, x: torch.Tensor, encode: Callable[[torch.Tensor], T]) -> T:
        """The codes of this very tensor: the last ones, or new ones, kept for the other readers while the tensor
        lives."""
        if torch.compiler.is_compiling() or x.is_inference():
            return encode(x)
        if self._of is not None:
            last, version, encoded = self._of
            if last() is x and version == version_of(x):
                self._reads += 1
                if self._reads == self.readers:
                    self._of = None
                return encoded
        encoded = encode(x)
        self._of, self._reads = (weakref.ref(x, self._forget), version_of(x), encoded), 1
        return encoded

    def _forget(self, dead: "weakref.ref[torch.Tensor]") -> None:
        if self._of is not None and self._of[0] is dead:
            self._of = None


class LowPrecision(Product):
    """A product whose operands are quantized."""

    def __init__(
        self, recipe: Recipe, name: str = "", *, seed: int = 0, draws: Draws | None = None, past: Past | None = None
    ) -> None:
        """
        Args:
            recipe: how.
            name: the layer's; with `seed`, the run's, it seeds the layer's random numbers.
            draws: the numbers of tokens, on which stochastic rounding of gradients depends.
            past: for delayed scales; its history is a submodule of the layer, so that it knows whether the layer
                trains.
        """
        self.recipe, self.draws, self.past = recipe, draws, past
        self.names = ("weight", "numbers") if recipe.four_bits else ("weight",)
        self.over: dict[Dim, Spread] = {"tokens": unreduced, "in": unreduced, "out": unreduced}
        """A slot: reduces a maximum over this rank's part of a dim to the maximum over all of it."""
        self.part = 0
        """A slot: the index of this rank's part of the outputs, if ranks have equal parts."""
        self.keeps_codes = False
        """A slot: whether the forward pass saves the codes of the input instead of the input, for the weight's
        gradient. If both scale the input the same way, the numbers are equal; else the decoded values are quantized
        once more."""
        self.last: LastEncoded[Encoded] | None = None
        """A slot: the codes shared by layers that read the same input."""
        self.kernel: bool | None = None
        """A slot: whether a kernel multiplies; None: if the device has one."""
        self._keys = {use: hash_key(seed, name, use) for use in ("input gradient", "weight gradient")}

    @property
    def spreads(self) -> bool:
        """Whether scales are reduced over several ranks."""
        return any(over is not unreduced for over in self.over.values())

    def has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a kernel multiplies here, if the sizes allow it."""
        return has_kernel(self.recipe, device, dtype) if self.kernel is None else self.kernel

    def noted(self, weights: Weights) -> Weights:
        """See `Product`: the numbers of the tokens in the current forward pass."""
        if not self.recipe.four_bits or self.draws is None:
            return weights
        return {**weights, "numbers": self.draws.numbers}

    def compute(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        return self.compute_keeping(x, weights)[0]

    def compute_keeping(self, x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, Kept]:
        """See `Product`: the codes of x, or x."""
        encoded = self.encoded(x) if self.last is None else self.last.of(x, self.encoded)
        y = self.product_of(encoded, weights, x.dtype).view(*x.shape[:-1], -1)
        return y, (encoded.codes, encoded.scales) if self.keeps_codes else (x,)

    def encoded(self, x: torch.Tensor) -> Encoded:
        """The input [..., D] in codes."""
        return self._encode("input", x.flatten(0, -2), self.recipe.forward[0], ("tokens", "in"))

    def product_of(self, encoded: Encoded, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
        """The output [M, N] of an input in codes."""
        right = self._encode("weight", weights["weight"], self.recipe.forward[1], ("out", "in"))
        y, bias_N = self._multiply(encoded, right, dtype, fast=True), weights.get("bias")
        return y if bias_N is None else y + bias_N

    def input_gradient(self, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., N] to [..., D]."""
        grad_MN, weight_DN = grad.flatten(0, -2), weights["weight"].t()
        one, other = self.recipe.input_gradient
        numbers, features = self._numbers(weights), grad_MN.shape[1]

        def uniform(tokens: slice) -> torch.Tensor:
            assert numbers is not None
            return self._uniform("input gradient", numbers[tokens], slice(0, features), features)

        left = self._encode("gradient", grad_MN, one, ("tokens", "out"), None if numbers is None else uniform)
        right = self._encode("weight", weight_DN, other, ("in", "out"))
        return self._multiply(left, right, grad.dtype).view(*grad.shape[:-1], -1)

    def weight_gradient(self, x: torch.Tensor, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[N, D]."""
        grad_NM, x_DM = grad.flatten(0, -2).t(), x.flatten(0, -2).t()
        if self.recipe.weight_gradient is None:
            return matmul(grad_NM, x_DM.t())
        return self._weight_gradient(grad_NM, x_DM, weights)

    def weight_gradient_of(self, kept: Kept, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See `Product`."""
        if not self.keeps_codes:
            return super().weight_gradient_of(kept, grad, weights)
        (codes, scales), grad_MN = kept, grad.flatten(0, -2)
        encoded = Encoded(codes, scales, (len(grad_MN), weights["weight"].shape[1]), False)
        again = encoded.transposed() if self.recipe.reads_codes else encoded.decode().t()
        return self._weight_gradient(grad_MN.t(), again, weights)

    def _weight_gradient(self, grad_NM: torch.Tensor, x_DM: torch.Tensor | Encoded, weights: Weights) -> torch.Tensor:
        assert self.recipe.weight_gradient is not None
        one, other = self.recipe.weight_gradient
        numbers, (features, tokens) = self._numbers(weights), grad_NM.shape

        def uniform(outputs: slice) -> torch.Tensor:
            assert numbers is not None
            drawn_NM = self._uniform("weight gradient", numbers, outputs, features).t()
            return F.pad(drawn_NM, (0, -tokens % HADAMARD))

        left = self._encode("gradient", grad_NM, one, ("out", "tokens"), None if numbers is None else uniform)
        right = x_DM if isinstance(x_DM, Encoded) else self._encode("input", x_DM, other, ("in", "tokens"))
        return self._multiply(left, right, grad_NM.dtype)

    def _encode(
        self,
        role: Role,
        tensor_KS: torch.Tensor,
        scaling: Scaling,
        dims: tuple[Dim, Dim],
        uniform: Uniform | None = None,
    ) -> Encoded:
        """Codes; with four bits, products that sum over tokens multiply Hadamard transforms."""
        spread = self.over[dims[0]], self.over[dims[1]]
        scale = None
        if self.past is not None:
            self.past.see(role, tensor_KS)
            scale = self.past.scale(role, scaling)
        mixed = self.recipe.four_bits and dims[1] == "tokens"
        return encode(tensor_KS, scaling, spread, amax=scale, uniform=uniform, mixed=mixed)

    def _multiply(self, left: Encoded, right: Encoded, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
        """[K, S] times [N, S], transposed: [K, N]. `fast`: a kernel may sum in fewer bits, as torchao and Transformer
        Engine do in forward passes."""
        sizes = (*left.shape, right.shape[0])
        if self.has_kernel(left.codes.device, dtype) and not any(size % KERNEL_SIZES for size in sizes):
            return _by_kernel(left, right, dtype, fast)
        return linear(left.decode(), right.decode()).to(dtype)

    def _numbers(self, weights: Weights) -> torch.Tensor | None:
        """The numbers of tokens [M], by which gradients are rounded; None if they are rounded to nearest."""
        if not self.recipe.four_bits:
            return None
        numbers = weights.get("numbers")
        assert numbers is not None, "gradients are rounded by the numbers of tokens, and this batch has none"
        return numbers.flatten()

    def _uniform(self, use: str, numbers_M: torch.Tensor, outputs: slice, features: int) -> torch.Tensor:
        """Numbers in [0, 1) of 24 bits [M, N], which depend only on the run's seed, layer, use, token and output;
        `features`: of all outputs on this rank."""
        first = self.part * features + outputs.start
        bits = drawn_bits(self._keys[use], numbers_M, first, outputs.stop - outputs.start)
        return (bits >> 7).float() * 2.0**-24

    def __repr__(self) -> str:
        return f"{self.recipe.name}, quantized"


def has_kernel(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel, not emulation, computes products of this recipe on this device."""
    if on_cpu(device) or dtype != torch.bfloat16 or recipe.name not in KERNELS:
        return False
    return capability_of(device) >= KERNEL_CAPABILITY


def _by_kernel(left: Encoded, right: Encoded, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """The product of codes with one scale, or one scale per row."""
    scaling = F.ScalingType.TensorWise if left.scales.numel() == 1 else F.ScalingType.RowWise
    (a_KS, scale_a), (b_NS, scale_b) = ((one.whole(one.codes), 1 / one.scales) for one in (left, right))
    shapes = ((), ()) if left.scales.numel() == 1 else ((-1, 1), (1, -1))
    return F.scaled_mm(
        a_KS.contiguous(),
        b_NS.contiguous().t(),
        scale_a=scale_a.reshape(shapes[0]),
        scale_recipe_a=scaling,
        scale_b=scale_b.reshape(shapes[1]),
        scale_recipe_b=scaling,
        output_dtype=dtype,
        use_fast_accum=fast,
    )
