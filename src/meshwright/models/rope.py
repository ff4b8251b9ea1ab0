"""The one place that knows rotary position embeddings (Su et al., 2021) and Llama 3.1's frequency scaling.

Shapes: B batch (or 1), T sequence, H heads, K head_dim, R = K / 2 rotated pairs.
"""

import math

import torch

from meshwright.spec.model import ModelSpec, RopeScaling


class RopeTables:
    """Cosine and sine of every position's angles: fp32 [B, T, 1, R], or [T, 1, R] where the batch shares its positions.

    A plain class, because FSDP2's mixed precision casts what it finds in a block's inputs, tuples and dataclasses
    included, and in bf16 the angles of distant positions run together (Wang et al., "When Precision Meets Position",
    2024).
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos = cos
        self.sin = sin


def rope_frequencies(spec: ModelSpec, device: torch.device) -> torch.Tensor:
    """Angle per position of each rotated pair, fp32 [R]; computed in the order of operations of transformers,
    so that models agree to the last bit of fp32."""
    exponents_R = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    frequencies_R = 1.0 / (spec.rope_theta**exponents_R)
    return frequencies_R if spec.rope_scaling is None else _scaled(frequencies_R, spec.rope_scaling)


def _scaled(frequencies_R: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated (Dubey et al.,
    2024)."""
    original = scaling.original_max_positions
    wavelengths_R = 2 * math.pi / frequencies_R
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth_R = (original / wavelengths_R - low) / (high - low)
    between_R = (1 - smooth_R) * (frequencies_R / scaling.factor) + smooth_R * frequencies_R
    scaled_R = torch.where(wavelengths_R > original / low, frequencies_R / scaling.factor, between_R)
    return torch.where(wavelengths_R < original / high, frequencies_R, scaled_R)


def rope_tables(spec: ModelSpec, positions_BT: torch.Tensor) -> RopeTables:
    """Tables for integer positions [B, T] or [T] (the same for the whole batch). Nothing is cached and
    nothing is a buffer, so a model built on the meta device has nothing left to initialise."""
    frequencies_R = rope_frequencies(spec, positions_BT.device)
    angles_BT1R = (positions_BT[..., None].float() * frequencies_R).unsqueeze(-2)
    return RopeTables(angles_BT1R.cos(), angles_BT1R.sin())


def apply_rope(x_BTHK: torch.Tensor, rope: RopeTables) -> torch.Tensor:
    """Rotate pairs (i, i + K/2) of each head by its position's angles; fp32 inside (fp64 for fp64), rounded
    once."""
    left_BTHR, right_BTHR = x_BTHK.chunk(2, dim=-1)
    cos, sin = rope.cos, rope.sin
    rotated = torch.cat((left_BTHR * cos - right_BTHR * sin, right_BTHR * cos + left_BTHR * sin), dim=-1)
    return rotated.to(x_BTHK.dtype)
