"""Message sizes of quantized collectives (ZeRO++, Wang et al., 2023). No torch here."""

from typing import Literal

Sent = Literal["none", "int8", "int4", "fp8"]
"""Formats of sent numbers: unchanged, quantized to this many bits, or the codes of fp8 matrix products."""

BITS: dict[Sent, int] = {"int8": 8, "int4": 4}
BLOCK = 256
"""Number of consecutive values of a tensor's shard that share a scale."""
SCALE_BYTES = 4


def levels(sent: Sent) -> int:
    """The largest code: the largest value of a block becomes this, or its negative."""
    return 2 ** (BITS[sent] - 1) - 1


def num_blocks(numbers: int) -> int:
    """Number of blocks in `numbers` values; the last block may be shorter."""
    return -(-numbers // BLOCK)


def code_bytes(numbers: int, sent: Sent) -> int:
    """Bytes of the codes of `numbers` values."""
    return -(-numbers * BITS[sent] // 8)


def sent_bytes(numbers: int, sent: Sent, width: int, *, matrix: bool) -> int:
    """Bytes of a rank's shard of a tensor on the wire; `width`: bytes of an unquantized number.

    Only matrices, and stacks of them, are quantized: norms and biases are few and matter much. fp8 applies only to
    matrices of layers in fp8, whose scales every rank knows.
    """
    if sent == "none" or not matrix:
        return numbers * width
    if sent == "fp8":
        return numbers
    return num_blocks(numbers) * SCALE_BYTES + code_bytes(numbers, sent)


def bytes_each(sent: Sent) -> float:
    """Bytes per number of a large matrix, with its share of the scale."""
    return 1.0 if sent == "fp8" else BITS[sent] / 8 + SCALE_BYTES / BLOCK
