"""Error feedback for quantized gradients: what rounding leaves out of a reduction is added to the next one.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (2014); Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019); for
ZeRO, Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training" (2024). A rank sends its gradient
plus its error, quantized, and its new error is what the quantization left out. So over any number of reductions the
sent gradients sum to the true ones, up to the last error, at most half a quantization step of a number.

An error belongs to a rank and covers everything that the rank sends: the gradients of all matrices that it computes
with, however ZeRO shards them. Like LoCo's, it is kept in eight bits, in blocks with a scale. It has the unit of the
gradient of a step's mean loss, so fp16's loss scale may change.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from meshwright.comm.quantize import Coded
from meshwright.spec.quantized import KEPT, SentPart


class KeptErrors:
    """This rank's errors in the gradients of matrices that are reduced together."""

    def __init__(self, matrices: Sequence[SentPart], ranks: int) -> None:
        """
        Args:
            matrices: as sent to one rank.
            ranks: over which every matrix is reduced.
        """
        self.matrices, self.ranks = tuple(matrices), ranks
        self.scale = 1.0
        """fp16's loss scale in the gradients of this step."""
        self.bytes_RB = torch.empty(0, dtype=torch.uint8)
        """The encoded errors, a row for each receiver; empty until `allocate`."""

    def allocate(self, device: torch.device) -> None:
        """Begin without errors."""
        size = sum(piece.kept_bytes for piece in self.matrices)
        self.bytes_RB = torch.zeros(self.ranks, size, dtype=torch.uint8, device=device)

    def of(self, piece: SentPart) -> Coded:
        """The errors of a matrix."""
        start = sum(other.kept_bytes for other in self.matrices[: self.matrices.index(piece)])
        return Coded(self.bytes_RB[:, start : start + piece.kept_bytes], piece.numbers, KEPT, piece.row)

    def write(self, piece: SentPart, values_RN: torch.Tensor, sent: Coded) -> None:
        """Encode a matrix's gradient plus its error, and keep the new error; row by row, to save memory."""
        kept = self.of(piece)
        for row in range(self.ranks):
            values, error, there = values_RN[row : row + 1], kept.part(row), sent.part(row)
            whole = torch.empty_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            error.read(whole)
            whole.mul_(self.scale).add_(values)
            decoded = whole.clone()
            there.write(decoded)
            there.read(decoded)
            error.write(whole.sub_(decoded).div_(self.scale))


class ErrorFeedback:
    """All errors of a rank, between steps; nothing without `layout.gradient_error_feedback`."""

    def __init__(self, kept: Iterable[KeptErrors]) -> None:
        self.kept = tuple(kept)

    def allocate(self, device: torch.device) -> None:
        """Begin without errors, on the device that computes the gradients."""
        for errors in self.kept:
            errors.allocate(device)

    def begin(self, scale: float) -> None:
        """Call before a step's backward passes; `scale`: the loss scale."""
        for errors in self.kept:
            errors.scale = scale

    def drop(self) -> None:
        """Forget all errors: after a step without an update they belong to a gradient that was never applied, perhaps
        a non-finite one."""
        for errors in self.kept:
            errors.bytes_RB.zero_()

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """The errors as in a checkpoint, under names of this rank."""
        return {f"{ERRORS}{rank}.{errors.matrices[0].name}": errors.bytes_RB for errors in self.kept}

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside the block, gradients may be computed that no step applies; then the errors are restored."""
        before = [errors.bytes_RB.clone() for errors in self.kept]
        try:
            yield
        finally:
            for errors, bytes_RB in zip(self.kept, before, strict=True):
                errors.bytes_RB.copy_(bytes_RB)


ERRORS = "gradient_errors."
"""The beginning of the errors' names in a checkpoint."""
