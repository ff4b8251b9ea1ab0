"""Linear layers with quantized weights: quantization, and products with dequantized matrices.

Frozen parameters replace a matrix: `codes`, `scales` and, if scales are quantized too, `groups`
(`families/quantized.py` defines their shapes, `models/blockwise.py` their contents). They are integers: code that
moves, shards, gathers or counts parameters treats them like any other. A matrix is decoded for a product and freed
after it; the backward pass decodes it a second time.

Shapes: D in, N out.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
import torch.nn.functional as F

from meshwright.families.quantized import BLOCK
from meshwright.models.blockwise import (
    Scales,
    as_bits,
    block_scales,
    decode_int8,
    decode_nf4,
    decode_scales,
    encode_int8,
    encode_nf4,
    encode_scales,
)
from meshwright.models.cpu_kernels import linear, matmul
from meshwright.models.linear import Product
from meshwright.models.slots import Weights
from meshwright.spec.model import Parameter

RowSource = Callable[[Parameter, int, int], torch.Tensor]
"""(parameter, start, stop) -> rows [start, stop) of dim 0 of its global value."""

NUMBERS_AT_ONCE = 2**26
"""Numbers of a matrix read at a time if all its scales are needed."""


class Quantized(Product):
    """A product with a frozen quantized weight: `codes`, `scales` and `groups`, decoded for every product."""

    names = ("codes", "scales", "groups")

    def __init__(self, kept_as: str, shape_ND: tuple[int, int]) -> None:
        """`shape_ND` is the whole matrix's; `kept_as` is a display name."""
        self.kept_as, self.shape_ND = kept_as, shape_ND

    def compute(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        y, bias_N = linear(x, self._decode(weights, x.dtype)), weights.get("bias")
        return y if bias_N is None else y + bias_N

    def input_gradient(self, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., N] to [..., D]."""
        weight_ND = self._decode(weights, grad.dtype)
        return matmul(grad.flatten(0, -2), weight_ND).view(*grad.shape[:-1], -1)

    def merged(self, weights: Weights) -> Weights:
        """The matrix, decoded, in the dtype of its adapter; fp32 without one."""
        adapter = weights.get("lora_a")
        return {"weight": self._decode(weights, torch.float32 if adapter is None else adapter.dtype)}

    def _decode(self, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
        return decode([weights.get(name) for name in self.names], self.shape_ND, dtype)

    def __repr__(self) -> str:
        return self.kept_as


def decode(kept: Sequence[torch.Tensor | None], shape_ND: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`, from its codes, scales and groups. Codes of some of the rows, or of a part of every row,
    give that part."""
    codes, scales, groups = kept
    assert codes is not None
    assert scales is not None
    decoded_scales = decode_scales(Scales(scales, groups))
    if codes.dtype == torch.int8:
        return decode_int8(codes, decoded_scales, dtype)
    numbers = decode_nf4(codes, decoded_scales, dtype)
    rows, columns = shape_ND
    return numbers[: rows * columns].view(shape_ND) if columns % BLOCK else numbers.view(len(codes), -1)


class QuantizedRows:
    """Any rows of the codes, scales and groups of quantized matrices, computed from rows of the matrices.

    Quantized scales depend on the mean of all scales of their matrix. Every rank therefore reads the whole matrix, a
    slice at a time, and caches its scales until the next matrix. The result is the same under every layout, and no rank
    waits for another.
    """

    def __init__(self, read: RowSource, weights: Iterable[Parameter], table: Iterable[Parameter]) -> None:
        """`read` returns rows of any parameter that is not quantized; `weights` is the table of parameters before
        quantization, `table` after it."""
        self._read = read
        self._kept = {row.name: row for row in table if row.storage != "float"}
        quantized = {row.name.rpartition(".")[0] for row in self._kept.values()}
        self._weights = {row.name: row for row in weights if row.name.removesuffix(".weight") in quantized}
        self._scales: tuple[str, Scales] | None = None

    def __call__(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dim 0 of a parameter; for a quantized matrix, its decoded numbers, fp32."""
        if parameter.name in self._weights:
            return self._decoded(parameter)[start:stop]
        if parameter.name not in self._kept:
            return self._read(parameter, start, stop)
        module, _, name = parameter.name.rpartition(".")
        weight = self._weights[f"{module}.weight"]
        if self._kept[f"{module}.codes"].storage == "int8":
            codes_ND, scales_N = encode_int8(self._read(weight, start, stop))
            return codes_ND if name == "codes" else as_bits(scales_N)
        if name == "codes":
            width = 2 * parameter.shape[1]
            packed, _ = encode_nf4(self._numbers(weight, start * width, stop * width))
            return packed.view(stop - start, -1)
        if f"{module}.groups" not in self._kept:
            width = BLOCK * prod(parameter.shape[1:])
            scales = block_scales(self._numbers(weight, start * width, stop * width))
            return as_bits(scales).view(stop - start, *parameter.shape[1:])
        scales, groups = self._all_scales(weight)
        assert groups is not None
        return (groups if name == "groups" else scales.view(parameter.shape))[start:stop]

    def _numbers(self, weight: Parameter, first: int, last: int) -> torch.Tensor:
        """Numbers [first, last) of a matrix, row by row; zeros beyond its end."""
        rows, columns = weight.shape
        start = first // columns
        numbers = self._read(weight, start, min(rows, -(-last // columns))).reshape(-1)
        numbers = numbers[first - start * columns : last - start * columns]
        return F.pad(numbers, (0, last - first - len(numbers)))

    def _all_scales(self, weight: Parameter) -> Scales:
        if self._scales is None or self._scales[0] != weight.name:
            end = -(-weight.numel // BLOCK) * BLOCK
            slices = ((first, min(first + NUMBERS_AT_ONCE, end)) for first in range(0, end, NUMBERS_AT_ONCE))
            scales = [block_scales(self._numbers(weight, *part)) for part in slices]
            self._scales = weight.name, encode_scales(torch.cat(scales), double=True)
        return self._scales[1]

    def _decoded(self, weight: Parameter) -> torch.Tensor:
        module = weight.name.rpartition(".")[0]
        rows = (self._kept.get(f"{module}.{name}") for name in ("codes", "scales", "groups"))
        kept = [None if row is None else self(row, 0, row.shape[0]) for row in rows]
        rows, columns = weight.shape
        return decode(kept, (rows, columns), torch.float32)
