"""Rotary position embeddings (Su et al., 2021) and their scaling, as in Llama 3.1 and YaRN.

Shapes: B batch (or 1), T sequence, H heads, K rotated width of a head, R = K / 2 rotated pairs.
"""

import functools
import math
from typing import assert_never

import torch

from meshwright.spec.layers import Rope, RopeScaling


class RopeTables:
    """Cosine and sine of every position's angles: fp32 [B, T, 1, R], or [T, 1, R] if the batch shares its positions.

    A plain class, because FSDP2's mixed precision casts tensors in a block's inputs, tuples and dataclasses included,
    and in bf16 the angles of distant positions collide (Wang et al., "When Precision Meets Position", 2024).
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos = cos
        self.sin = sin

    @functools.cached_property
    def turns(self) -> torch.Tensor:
        """Every pair's angle as a complex number. Multiplying a pair (i, i + K/2), as a complex number, by it rotates
        the pair."""
        return torch.complex(self.cos, self.sin)


def rope_frequencies(rope: Rope, width: int, device: torch.device) -> torch.Tensor:
    """Angle per position of each rotated pair of `width` numbers, fp32 [R]; computed in transformers' order of
    operations, so that models agree to the last bit of fp32."""
    exponents_R = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    powers_R = rope.theta**exponents_R
    if rope.scaling is None:
        return 1.0 / powers_R
    match rope.scaling.kind:
        case "yarn":
            return _yarn(powers_R, rope.scaling, rope.theta)
        case "llama3":
            return _llama3(1.0 / powers_R, rope.scaling)
        case "linear":
            return 1.0 / powers_R / rope.scaling.factor
        case _:
            assert_never(rope.scaling.kind)


def _yarn(powers_R: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Low frequencies divided by `factor`, high ones unchanged, those between interpolated linearly in the pair's index
    (Peng et al., "YaRN", 2023, section 3.2; between whole pairs, as in its code, unless `truncate` is off)."""
    pairs = len(powers_R)

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that turns this many times in the original context."""
        return pairs * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    steps_R = torch.arange(pairs, dtype=torch.float32, device=powers_R.device) - low
    kept_R = 1 - (steps_R / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers_R) * (1 - kept_R) + 1.0 / powers_R * kept_R


def _growth(scaling: RopeScaling, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _turn_factor(scaling: RopeScaling | None) -> float:
    """The factor of cosines and sines."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _growth(scaling, scaling.mscale) / _growth(scaling, scaling.mscale_all_dim)
    return _growth(scaling)


def attention_scale(rope: Rope | None) -> float:
    """The factor of latent attention's scores, besides one over the root of head_dim."""
    scaling = None if rope is None else rope.scaling
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _growth(scaling, scaling.mscale_all_dim) ** 2


def _llama3(frequencies_R: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Low frequencies divided by `factor`, high ones unchanged, those between interpolated (Dubey et al., 2024)."""
    original = scaling.original_max_positions
    wavelengths_R = 2 * math.pi / frequencies_R
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth_R = (original / wavelengths_R - low) / (high - low)
    between_R = (1 - smooth_R) * (frequencies_R / scaling.factor) + smooth_R * frequencies_R
    scaled_R = torch.where(wavelengths_R > original / low, frequencies_R / scaling.factor, between_R)
    return torch.where(wavelengths_R < original / high, frequencies_R, scaled_R)


def rope_tables(rope: Rope, width: int, positions_BT: torch.Tensor) -> RopeTables:
    """Tables for integer positions [B, T] or [T] (shared by the whole batch), and heads of which `width` numbers are
    rotated. Nothing is cached or stored as a buffer, so a model built on the meta device has nothing left to
    initialise."""
    frequencies_R = rope_frequencies(rope, width, positions_BT.device)
    angles_BT1R = (positions_BT[..., None].float() * frequencies_R).unsqueeze(-2)
    factor = _turn_factor(rope.scaling)
    return RopeTables(angles_BT1R.cos() * factor, angles_BT1R.sin() * factor)


def apply_rope(x_BTHK: torch.Tensor, rope: RopeTables) -> torch.Tensor:
    """Rotate pairs (i, i + R) of the first 2 R numbers of each head by its position's angles; fp32 inside (fp64 for
    fp64), rounded once."""
    cos, sin = rope.cos, rope.sin
    pairs = cos.shape[-1]
    left_BTHR, right_BTHR = x_BTHK[..., :pairs], x_BTHK[..., pairs : 2 * pairs]
    rotated = torch.cat((left_BTHR * cos - right_BTHR * sin, right_BTHR * cos + left_BTHR * sin), dim=-1)
    rotated = rotated.to(x_BTHK.dtype)
    return rotated if x_BTHK.shape[-1] == 2 * pairs else torch.cat((rotated, x_BTHK[..., 2 * pairs :]), dim=-1)
