"""fp8 matrices of Hugging Face directories, multiplied out with their scales as they are read."""

from typing import Any

import torch

from meshwright.checkpoint.tensor_files import UnmappedTensor
from meshwright.families.tensor_headers import StoredTensor


class Dequantized:
    """One matrix, or a stack of them, in fp32; read piece by piece, as safetensors' slices are.

    Its scales are one number, one for each row, or one for each block of rows and columns.
    """

    def __init__(self, codes: Any, shape: tuple[int, ...], scale: StoredTensor, block: tuple[int, int] | None) -> None:
        """`codes`: a slice of the stored fp8 numbers."""
        self._codes, self._shape, self._block = codes, shape, block
        self._scale = UnmappedTensor(scale)[:].float().reshape(scale.shape)

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        """Rows (of a stack, matrices), or rows and columns."""
        if isinstance(places, tuple):
            return self[places[0]][:, places[1]]
        start, stop, _ = places.indices(self._shape[0])
        return self._codes[start:stop].float() * self._scales(start, stop)

    def _scales(self, start: int, stop: int) -> torch.Tensor:
        """The scales of rows, in a shape that their product with these rows has none larger."""
        if self._scale.numel() == 1:
            return self._scale.reshape(())
        if self._block is None:
            one_each = self._scale if self._scale.dim() > 1 else self._scale[:, None]
            return one_each[start:stop]
        rows, columns = self._block
        *outer, height, width = self._shape
        if outer:
            return _spread(self._scale[start:stop], rows, columns)[:, :height, :width]
        first = start // rows
        spread = _spread(self._scale[first : -(-stop // rows)], rows, columns)
        return spread[start - first * rows : stop - first * rows, :width]


def _spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
