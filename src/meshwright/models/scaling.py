"""Scaled low-precision numbers: formats, scales, codes and decoded values, equal bit for bit on any device.

A matrix is scaled in blocks. A block's scale maps its largest absolute value (amax) into the format:

| scale        | code      | made as                                                                            |
|--------------|-----------|------------------------------------------------------------------------------------|
| fp32         | x s       | s = the format's largest / amax, in fp32 (torchao; DeepSeek-AI, "DeepSeek-V3", 2024) |
| power_of_two | x s       | the same, rounded down to a power of two (torchao's rowwise recipes)               |
| delayed      | x s       | s = largest / amax of steps before / 2^margin; before the first 1 (Transformer Engine) |
| e8m0         | x 2^-e    | e = floor(log2 amax) - the exponent of the format's largest (OCP MX 1.0, section 6.3) |
| nvfp4        | x / (t s) | t = amax of the whole matrix / (6 * 448), in fp32; s = amax / 6 / t, in e4m3       |

Scaled numbers beyond the format's largest saturate. Computed in fp32, or in fp64 for fp64 matrices.

Shapes: a matrix [K, S]: K rows that a product keeps, S columns that it sums over; blocks of r x c.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F

from meshwright.devices import of_kind

SMALLEST = 1e-12
"""The assumed largest value of a block of zeros."""

LEAST_E4M3 = 2.0**-6
"""The least scale of NVFP4's blocks: e4m3's smallest normal number."""

HADAMARD = 16
"""Numbers that a Hadamard transform mixes."""

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of the random Hadamard transform, as in Transformer Engine."""


def _transform() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < HADAMARD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.tensor(SIGNS)[:, None] * matrix / HADAMARD**0.5


TRANSFORM = _transform()
"""The random Hadamard transform [16, 16]: orthogonal."""

AT_ONCE = {"cpu": 2**21, "gpu": 2**24}
"""Numbers of a matrix that are quantized at a time; intermediates take up to 24 bytes each. On a GPU so many that most
matrices are one piece, whose kernels take longer than their launches. Compiled code fuses them instead."""

Spread = Callable[[torch.Tensor], torch.Tensor]
"""Reduces maxima over this rank's part of a dim to maxima over all of it."""

Uniform = Callable[[slice], torch.Tensor]
"""Numbers in [0, 1) for rows of a matrix: [k, S]."""


class Format(NamedTuple):
    """A low-precision number format."""

    name: str
    largest: float
    exponent: int
    """The exponent of the largest number."""
    dtype: torch.dtype | None
    """torch's; None for e2m1, whose codes are stored as the numbers that they represent, in bf16."""


E4M3 = Format("e4m3", 448.0, 8, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 57344.0, 15, torch.float8_e5m2)
E2M1 = Format("e2m1", 6.0, 2, None)


@dataclass(frozen=True)
class Scaling:
    """How an operand of a product is quantized."""

    format: Format
    rows: int | None
    """Size of a block along the dim that the product keeps; None: all."""
    columns: int | None
    """Size of a block along the dim that it sums over; None: all."""
    scale: Literal["fp32", "power_of_two", "delayed", "e8m0", "nvfp4"] = "fp32"


class Encoded(NamedTuple):
    """A quantized matrix: blocks of codes [K / r, r, S / c, c], the last ones padded with zeros, and a scale of
    each."""

    codes: torch.Tensor
    scales: torch.Tensor
    """[K / r, 1, S / c, 1], fp32."""
    shape: tuple[int, int]
    """K and S."""
    multiplies: bool
    """Whether a number is code * scale, rather than code / scale."""

    def decode(self) -> torch.Tensor:
        """The matrix [K, S], in fp32 (fp64)."""
        numbers = self.codes.to(torch.promote_types(self.scales.dtype, torch.float32))  # a copy: codes are narrower
        return self.whole(numbers.mul_(self.scales) if self.multiplies else numbers.div_(self.scales))

    def transposed(self) -> "Encoded":
        """The matrix [S, K], of the same codes."""
        order = 2, 3, 0, 1
        rows, columns = self.shape
        return Encoded(self.codes.permute(order), self.scales.permute(order), (columns, rows), self.multiplies)

    def whole(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks as a matrix, without the padding."""
        rows, columns = self.shape
        return blocks.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()


def encode(
    x_KS: torch.Tensor,
    scaling: Scaling,
    spread: tuple[Spread, Spread],
    *,
    amax: torch.Tensor | None = None,
    uniform: Uniform | None = None,
    mixed: bool = False,
) -> Encoded:
    """Quantize a matrix.

    Args:
        x_KS: the matrix, or this rank's part of it.
        scaling: how.
        spread: of maxima over dim 0, and over dim 1.
        amax: the expected largest value, for delayed scales; 0 if none is known.
        uniform: draws numbers for stochastic rounding; None: to the nearest, ties to even. For e2m1 only.
        mixed: quantize the matrix's Hadamard transform.
    """
    wide = torch.promote_types(x_KS.dtype, torch.float32)
    parts = _parts(x_KS, scaling)

    def made(rows: slice) -> torch.Tensor:
        return _blocks((hadamard(x_KS[rows]) if mixed else x_KS[rows]).to(wide), scaling)

    only = made(parts[0]) if len(parts) == 1 else None

    def blocks(rows: slice) -> torch.Tensor:
        """Of several parts none is kept: they are made again for their codes."""
        return made(rows) if only is None else only

    if scaling.scale == "delayed":
        assert amax is not None
        scales, factors, multiplies = amax.to(torch.float32).expand(1, 1, 1, 1), None, False
    else:
        largest = _largest([blocks(rows).abs().amax((1, 3), keepdim=True) for rows in parts], scaling, spread)
        scales, factors, multiplies = _scales(largest, scaling, spread)
    scales = scales.to(wide)
    factors = scales if factors is None else factors.to(wide)
    codes, first = [], 0
    for rows in parts:
        scaled = blocks(rows)
        of_rows = factors[first : first + len(scaled)] if len(factors) > 1 else factors
        scaled = (scaled * of_rows).clamp_(-scaling.format.largest, scaling.format.largest)
        first += len(scaled)
        if scaling.format.dtype is not None:
            codes.append(scaled.to(scaling.format.dtype))
        else:
            drawn = None if uniform is None else _blocks(uniform(rows).to(wide), scaling)
            codes.append(round_e2m1(scaled, drawn).to(torch.bfloat16))
    columns = x_KS.shape[1] + (-x_KS.shape[1] % HADAMARD if mixed else 0)
    whole = codes[0] if len(codes) == 1 else torch.cat(codes, 1 if scaling.rows is None else 0)
    return Encoded(whole, scales, (x_KS.shape[0], columns), multiplies)


def _parts(x_KS: torch.Tensor, scaling: Scaling) -> list[slice]:
    """The rows that are quantized at a time: whole blocks."""
    rows, unit = x_KS.shape[0], scaling.rows or 1
    most = (
        rows if torch.compiler.is_compiling() else max(1, of_kind(AT_ONCE, x_KS) // max(1, x_KS.shape[1] * unit)) * unit
    )
    return [slice(start, min(start + most, rows)) for start in range(0, max(1, rows), max(1, most))]


def delayed_scale(amax: torch.Tensor, format: Format, margin: int) -> torch.Tensor:
    """Transformer Engine's delayed scale: largest / amax / 2^margin, fp32; 1 if there were only zeros."""
    scale = (format.largest / amax) / 2.0**margin
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(torch.float32).max), scale)


def round_e2m1(x: torch.Tensor, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """Round numbers in [-6, 6] to 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives: to the nearest, ties to the even
    code, or stochastically, up or down with the mean unchanged."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    return (steps.round() if uniform is None else (steps + uniform).floor()).mul(step).copysign(x)


def hadamard(x_KS: torch.Tensor) -> torch.Tensor:
    """The random Hadamard transform of every 16 columns, the last ones padded with zeros. It is orthogonal, so a
    product over the columns of two matrices stays the same."""
    blocks = F.pad(x_KS, (0, -x_KS.shape[1] % HADAMARD)).unflatten(1, (-1, HADAMARD))
    wide = torch.promote_types(x_KS.dtype, torch.float32)
    return (blocks.to(wide) @ TRANSFORM.to(x_KS.device, wide)).flatten(1)


def _blocks(x_KS: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """[K / r, r, S / c, c]."""
    rows, columns = scaling.rows or x_KS.shape[0], scaling.columns or x_KS.shape[1]
    room = -x_KS.shape[0] % rows, -x_KS.shape[1] % columns
    padded = F.pad(x_KS, (0, room[1], 0, room[0])) if any(room) else x_KS
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _largest(maxima: list[torch.Tensor], scaling: Scaling, spread: tuple[Spread, Spread]) -> torch.Tensor:
    """The largest value of every block over all ranks, [K / r, 1, S / c, 1], from the maxima of rows."""
    amax = maxima[0] if len(maxima) == 1 else torch.cat(maxima)
    if scaling.rows is None and len(maxima) > 1:
        amax = amax.amax(0, keepdim=True)
    for size, over in zip((scaling.rows, scaling.columns), spread, strict=True):
        amax = over(amax) if size is None else amax
    return amax


def _scales(
    amax: torch.Tensor, scaling: Scaling, spread: tuple[Spread, Spread]
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """The scales of blocks; the factor of numbers before rounding, if it is not the scale; and whether decoding
    multiplies by the scale."""
    match scaling.scale:
        case "e8m0":
            exponents = (amax.float().view(torch.int32) >> 23 & 255) - 127 - scaling.format.exponent
            return torch.exp2(-exponents.clamp(-126, 127).float()), None, False
        case "nvfp4":
            whole = amax.amax()
            for over in spread:
                whole = over(whole)
            tensor = (whole.float() / (E4M3.largest * E2M1.largest)).clamp(min=torch.finfo(torch.float32).tiny)
            of_blocks = (amax.float() / E2M1.largest / tensor).clamp(LEAST_E4M3, E4M3.largest)
            of_blocks = of_blocks.to(torch.float8_e4m3fn).float()
            return of_blocks * tensor, 1 / tensor / of_blocks, True
        case "fp32" | "power_of_two" | "delayed":
            # Divided in fp64, because compiled and eager divisions differ in fp32's last bit.
            scales = (scaling.format.largest / amax.double().clamp(min=SMALLEST)).float()
            if scaling.scale == "power_of_two":
                scales = torch.exp2(torch.floor(torch.log2(scales)))
            return scales, None, False
        case _:
            assert_never(scaling.scale)
