"""Message sizes of quantized collectives (ZeRO++, Wang et al., 2023). No torch here."""

from dataclasses import dataclass
from typing import Literal, assert_never

from meshwright.spec.pieces import PIECES

Sent = Literal["none", "int8", "int4", "fp8"]
"""Formats of sent numbers: unchanged, quantized to this many bits, or the codes of fp8 matrix products."""

BITS: dict[Sent, int] = {"int8": 8, "int4": 4}
SCALE_BYTES = 4
KEPT: Sent = "int8"
"""Format of the errors that a rank keeps of its sent gradients (`layout.gradient_error_feedback`)."""


def levels(sent: Sent) -> int:
    """The largest code: the largest value of a block becomes this, or its negative."""
    return 2 ** (BITS[sent] - 1) - 1


def num_blocks(numbers: int, row: int | None = None) -> int:
    """Number of blocks in `numbers` values, in rows of `row` or in one; the last block of a row may be shorter.

    A block ends with its row, because rows may differ in size by orders of magnitude, like those of frequent and rare
    tokens.
    """
    row = row or numbers
    return numbers // row * -(-row // PIECES.get().block)


def code_bytes(numbers: int, sent: Sent) -> int:
    """Bytes of the codes of `numbers` values."""
    return -(-numbers * BITS[sent] // 8)


def sent_bytes(numbers: int, sent: Sent, width: int, *, matrix: bool, row: int | None = None) -> int:
    """Bytes of a rank's shard of a tensor on the wire; `width`: bytes of an unquantized number; `row`: numbers of a row
    of a matrix.

    Only matrices, and stacks of them, are quantized: norms and biases are few and matter much. fp8 applies only to
    matrices of layers in fp8, whose scales every rank knows.
    """
    if not matrix:
        return numbers * width
    match sent:
        case "none":
            return numbers * width
        case "fp8":
            return numbers
        case "int8" | "int4":
            return num_blocks(numbers, row) * SCALE_BYTES + code_bytes(numbers, sent)
        case _:
            assert_never(sent)


def bytes_each(sent: Sent) -> float:
    """Bytes per number of a large matrix, with its share of the scale."""
    return 1.0 if sent == "fp8" else BITS[sent] / 8 + SCALE_BYTES / PIECES.get().block


@dataclass(frozen=True)
class SentPart:
    """A parameter's part on a rank, one of those sent together."""

    name: str
    numbers: int
    """Equal on every rank, because FSDP2 pads."""
    row: int
    """Numbers of a row."""
    matrix: bool
    sent: Sent
    """The format on the wire, if it is a matrix."""

    def sent_bytes(self, width: int) -> int:
        """Bytes on the wire; `width`: bytes of an unquantized number."""
        return sent_bytes(self.numbers, self.sent, width, matrix=self.matrix, row=self.row)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a matrix's errors."""
        return sent_bytes(self.numbers, KEPT, 0, matrix=True, row=self.row)
