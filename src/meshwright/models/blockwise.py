"""Block-wise quantization: one scale per block, one code per number.

    value = CODE[code] * scale of its block        (int8: code / 127 * scale of its row)

The scale of a block is its largest absolute value (absmax), so scaled values lie in [-1, 1]; a value gets the nearest
code. NF4 (Dettmers et al., "QLoRA", 2023) has sixteen codes, the quantiles of a normal distribution, packed two to a
byte, and blocks of 64. Its scales may be quantized too (double quantization): their mean is subtracted, and blocks of
256 are quantized to the 256 codes of the dynamic map (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
2022). Codes, scales and results equal bitsandbytes' on GPUs bit for bit, on any device, in any dtype and with any
number of threads.

fp32 scales are stored as int32 with the same bits, so casts of a model's floating-point numbers (FSDP2's mixed
precision, `Module.to`) leave them unchanged.
"""

import functools
import importlib
import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F

from meshwright.families.quantized import BLOCK, GROUP

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen codes, as in the paper's appendix E and in bitsandbytes."""

AT_ONCE = 2**24
"""Numbers decoded at a time; intermediates take sixteen bytes each."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that bitsandbytes decodes to."""

_kernels: set[str] = set()
"""The formats that bitsandbytes decodes."""

SMALLEST = 1e-38
"""The assumed largest value of a block of zeros."""


class Scales(NamedTuple):
    """The scales of one matrix's blocks."""

    scales: torch.Tensor
    """int32, the bits of fp32; or uint8 codes, if there are groups."""
    groups: torch.Tensor | None
    """int32, the bits of fp32 [G + 1]: the largest deviation of each 256 scales from their mean, and the mean."""


def encode_nf4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize whole blocks: any shape of n * 64 numbers to packed codes, uint8 [n * 32], and scales, fp32 [n].

    The first number of a pair is in the byte's high half.
    """
    codes, scales = encode_blocks(values.reshape(-1, BLOCK), code_book("nf4", values.device))
    pairs = codes.view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], scales


def block_scales(values: torch.Tensor) -> torch.Tensor:
    """The scales of `encode_nf4` alone."""
    return values.reshape(-1, BLOCK).abs().amax(1).float()


def decode_nf4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [2 * len(packed)] of packed codes and fp32 scales (of a block each), rounded from fp32 to `dtype`.

    Uses bitsandbytes' kernel if `load_kernels` has found it; it gives the same bits.
    """
    packed, scales = packed.reshape(-1, BLOCK // 2), scales.reshape(-1, 1)
    if _kernels and packed.device.type != "meta" and dtype in KERNEL_DTYPES and len(scales):
        decode = torch.ops.bitsandbytes.dequantize_4bit.default
        return decode(packed, scales.view(-1), BLOCK, "nf4", (len(scales), BLOCK), dtype).view(-1)
    pairs, decoded = _pairs(packed.device), torch.empty(len(scales), BLOCK, dtype=dtype, device=packed.device)
    blocks = AT_ONCE // BLOCK
    for start in range(0, len(scales), blocks):
        numbers = F.embedding(packed[start : start + blocks].int(), pairs).view(-1, BLOCK)
        torch.mul(numbers, scales[start : start + blocks], out=decoded[start : start + blocks])
    return decoded.view(-1)


def load_kernels() -> bool:
    """Decode NF4 by bitsandbytes' kernels from now on, if it is installed; returns whether it is."""
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of another package that it could use
        importlib.import_module("bitsandbytes")
        _kernels.add("nf4")
    except ImportError:
        pass
    return bool(_kernels)


def encode_scales(scales: torch.Tensor, *, double: bool) -> Scales:
    """Scales, fp32 [n], as stored: their bits, or, if `double`, a byte each."""
    scales = scales.cpu()
    if not double:
        return Scales(as_bits(scales), None)
    # Summed with a copy: torch sums a single row in several threads, and the last bit would depend on their number.
    mean = scales.expand(2, -1).mean(1)[:1]
    deviations = scales - mean
    padded = F.pad(deviations, (0, -len(scales) % GROUP)).view(-1, GROUP)
    codes, groups = encode_blocks(padded, code_book("signed", scales.device))
    return Scales(codes.view(-1)[: len(scales)], as_bits(torch.cat([groups, mean])))


def decode_scales(kept: Scales) -> torch.Tensor:
    """The scales, fp32 [n]."""
    scales = kept.scales.reshape(-1)
    if kept.groups is None:
        return scales.view(torch.float32)
    groups, mean = kept.groups.view(torch.float32).tensor_split([len(kept.groups) - 1])
    deviations = code_book("signed", scales.device)[scales.int()] * groups.repeat_interleave(GROUP)[: len(scales)]
    return deviations + mean


def encode_int8(values_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows: int8 [N, D] and their scales, fp32 [N], as LLM.int8 does to weights (Dettmers et al., 2022)."""
    values_ND = values_ND.float()
    scales_N = values_ND.abs().amax(1)
    return torch.round(values_ND * (127 / scales_N.clamp(min=SMALLEST))[:, None]).to(torch.int8), scales_N


def decode_int8(codes_ND: torch.Tensor, scales_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, D], rounded from fp32 to `dtype`."""
    return (codes_ND * scales_N[:, None] * (1 / 127)).to(dtype)


def encode_blocks(blocks: torch.Tensor, book: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of an ascending code book, uint8 [n, block], and scales, fp32 [n], of numbers [n, block]."""
    blocks = blocks.float()
    scales = blocks.abs().amax(1)
    # By the reciprocal, as on GPUs: a quotient differs in the last bit, so now and then a code would differ.
    scaled = (blocks * (1 / scales.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    return torch.bucketize(scaled, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8), scales


@functools.cache
def code_book(name: str, device: torch.device) -> torch.Tensor:
    """fp32 codes in ascending order: `nf4` (16), or the dynamic map, `signed` or `unsigned` (256)."""
    values = NF4 if name == "nf4" else _dynamic_map(signed=name == "signed")
    return torch.tensor(values, dtype=torch.float32, device=device)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """fp32 numbers as int32, the same bits."""
    return values.float().contiguous().view(torch.int32)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two numbers [256, 2] of every byte."""
    book = code_book("nf4", device)
    byte = torch.arange(256, device=device)
    return torch.stack([book[byte >> 4], book[byte & 15]], 1)


POWERS = 7
"""Powers of ten in the dynamic map: 10**-6 to 1."""


def code_of_zero(name: str) -> int:
    """The code of 0 in the dynamic map: `signed`, where all negative numbers precede it, or `unsigned`."""
    return sum(2**power for power in range(POWERS)) if name == "signed" else 0


def _dynamic_map(*, signed: bool) -> list[float]:
    """256 numbers in [-1, 1], or [0, 1]: the lower the power of ten, the fewer bits are left for the fraction.

    The fractions of a power are the middles of equal parts of [0.1, 1].
    """
    values = [0.0, 1.0]
    for power in range(POWERS):
        parts = 2 ** (power if signed else power + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        fractions = (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += fractions + [-value for value in fractions] * signed
    return sorted(values)
