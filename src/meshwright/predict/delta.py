"""Activation memory of a layer with the gated delta rule: what `models/gated_delta.py` and `models/delta_rule.py` save,
as bytes of a token of all heads.

Numbers of a token: W of the convolution; G C of a key head's scores within its chunk of C tokens, H C of a value
head's; H K and H V of keys and values by head; H K V / C of the states between chunks.
"""

from typing import NamedTuple

from meshwright.spec.layers import GatedDeltaSpec
from meshwright.spec.precision import FP32

CHUNK, SMALLEST = 64, 8
"""Tokens of a chunk, and the size of the triangular matrices that are inverted by powers, as in `models/delta_rule.py`
(which needs torch)."""


class _Sizes(NamedTuple):
    """Numbers of a token."""

    channels: int
    shares: int
    """H C."""
    key_shares: int
    """G C."""
    by_key: int
    """H K."""
    states: float
    """H K V / C."""


def _sizes(delta: GatedDeltaSpec, sequence: int) -> tuple[_Sizes, int]:
    chunk = min(CHUNK, sequence)
    by_key = delta.heads * delta.key_dim
    return _Sizes(
        sum(delta.segments), delta.heads * chunk, delta.key_heads * chunk, by_key, by_key * delta.value_dim / chunk
    ), chunk


def saved_by_delta(delta: GatedDeltaSpec, sequence: int, width: int) -> float:
    """Everything between the layer's input and its last product, whose operand is included; `width`: bytes of a number
    outside the rule, which computes in fp32 or wider."""
    wide, (sizes, _) = max(width, FP32.bytes), _sizes(delta, sequence)
    outside = 2 * sizes.channels + 3 * delta.values + delta.heads
    """Inputs of the convolution and its activation; of the norm, the gate's product and the last product."""
    inside = sizes.channels + 2 * delta.values  # the activation's result; the output gate's input and result
    # Products of queries and keys copy both, and keys once more; heads that share a key copy it before.
    inside += 7 * delta.keys if delta.heads == delta.key_heads else 4 * delta.keys + 2 * sizes.by_key
    inside += 8 * sizes.shares  # decays, both scores, the system, its inverse, that scaled twice, decayed scores
    inside += 3 * delta.values + 3 * sizes.by_key + 2 * sizes.states  # one by one, and stacked
    inside += 6 * delta.heads + 2 * delta.key_heads
    return width * outside + wide * inside


def products_of_delta(delta: GatedDeltaSpec, sequence: int, width: int) -> float:
    """Results of matrix products, except the last."""
    wide, (sizes, chunk) = max(width, FP32.bytes), _sizes(delta, sequence)
    inverse = delta.heads * _inverse_products(chunk) / chunk
    inside = 2 * sizes.key_shares + inverse + sizes.by_key + 4 * delta.values + sizes.states
    return width * (sizes.channels + delta.values + 2 * delta.heads) + wide * inside


def _inverse_products(size: int) -> int:
    """Numbers that the products of one inverse return."""
    if size <= SMALLEST:
        doublings = max(0, (size - 1).bit_length() - 1)
        return 2 * doublings * size**2
    half = size // 2
    return _inverse_products(half) + _inverse_products(size - half) + 2 * half * (size - half)
