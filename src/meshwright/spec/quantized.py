"""Sizes of what quantized collectives send (ZeRO++, Wang et al., 2023). No torch here."""

from typing import Literal

Sent = Literal["none", "int8", "int4", "fp8"]
"""Formats of sent numbers: unchanged, quantized to this many bits, or the codes that products in fp8 multiply."""

BITS: dict[Sent, int] = {"int8": 8, "int4": 4}
BLOCK = 256
"""Consecutive numbers of a tensor's part that share a scale."""
SCALE_BYTES = 4


def levels(sent: Sent) -> int:
    """The largest code: a block's largest number becomes this, or its negative."""
    return 2 ** (BITS[sent] - 1) - 1


def num_blocks(numbers: int) -> int:
    """Blocks of this many numbers; the last may be shorter."""
    return -(-numbers // BLOCK)


def code_bytes(numbers: int, sent: Sent) -> int:
    """Bytes of the codes of this many numbers."""
    return -(-numbers * BITS[sent] // 8)


def sent_bytes(numbers: int, sent: Sent, width: int, *, matrix: bool) -> int:
    """Bytes of a rank's part of a tensor on the wire; `width`: bytes of an unquantized number.

    Only matrices, and stacks of them, are quantized: norms and biases are few and matter much; for fp8, those of layers
    in fp8, whose scales every rank knows.
    """
    if sent == "none" or not matrix:
        return numbers * width
    if sent == "fp8":
        return numbers
    return num_blocks(numbers) * SCALE_BYTES + code_bytes(numbers, sent)


def bytes_each(sent: Sent) -> float:
    """Bytes of a number of a large matrix, with its share of the scale."""
    return 1.0 if sent == "fp8" else BITS[sent] / 8 + SCALE_BYTES / BLOCK
