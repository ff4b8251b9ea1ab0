"""Rows of tensors that a file stores in MXFP4 (`families/mxfp4_files.py`), multiplied out."""

from typing import Any

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1, with the sign in the fourth bit."""
BIAS = 127
"""Of the scales' exponents."""


class Unpacked:
    """A lazy tensor [E, D, O]: its first dim can be sliced."""

    def __init__(self, codes: Any, scales: Any) -> None:
        """`codes` [E, O, D / 32, 16] and `scales` [E, O, D / 32]: lazy tensors of uint8."""
        self._codes, self._scales = codes, scales

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """[E, D, O] in bf16, in which every product is exact."""
        codes, scales = self._codes[rows], self._scales[rows]
        values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.float32)
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()  # the low bits come first
        numbers = torch.ldexp(values[pairs], scales.int()[..., None] - BIAS)
        return numbers.flatten(-2).mT.to(torch.bfloat16)
