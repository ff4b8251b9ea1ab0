"""A layer's states of running sequences, in the place of keys and values.

Shapes: M sequences (rows of the cache), P of them at once, J - 1 inputs of W numbers that the convolution sees again, H
heads, K key width, V value width.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from meshwright.models.cache import Cache, CacheStep, NewTokens


class Kept(NamedTuple):
    """What some sequences have kept of earlier tokens."""

    rows: slice
    """Their rows in the cache."""
    inputs: torch.Tensor
    """The convolution's last inputs, [P, J - 1, W]."""
    state: torch.Tensor
    """[P, H, K, V]."""


class StateCache:
    """One layer's states, [M, H, K, V], and the convolution's last inputs, [M, J - 1, W]. `Cache.append` describes the
    next forward pass."""

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        self.inputs = self.state = torch.empty(0)

    @property
    def step(self) -> "CacheStep":
        """The forward pass in progress."""
        return self._cache.step

    def make_room(
        self, inputs: tuple[int, int], dtype: torch.dtype, state: tuple[int, int, int], wide: torch.dtype
    ) -> None:
        """Memory for every sequence of the step, given the shapes of one."""
        rows, old = self._cache.rows, (self.inputs, self.state)
        if self.state.dim() == 4 and len(self.state) >= rows:
            return
        self.inputs = torch.zeros(rows, *inputs, dtype=dtype, device=self._cache.device)
        self.state = torch.zeros(rows, *state, dtype=wide, device=self._cache.device)
        if old[1].dim() == 4:
            for new, kept in zip((self.inputs, self.state), old, strict=True):
                new[: len(kept)] = kept

    def of_singles(self) -> Kept:
        """Of the sequences that get one token; zeros of those that start."""
        rows, goes_on = slice(0, self.step.singles), self.step.places > 0
        inputs, state = self.inputs[rows], self.state[rows]
        return Kept(rows, inputs.where(goes_on[:, None, None], 0), state.where(goes_on[:, None, None, None], 0))

    def of_part(self, part: "NewTokens") -> Kept:
        """Of a sequence that gets several tokens; zeros if it starts."""
        rows = slice(part.row, part.row + 1)
        inputs, state = self.inputs[rows], self.state[rows]
        return (
            Kept(rows, inputs, state)
            if part.start
            else Kept(rows, inputs.new_zeros(inputs.shape), state.new_zeros(state.shape))
        )

    def store(self, kept: Kept, inputs: torch.Tensor, state: torch.Tensor) -> None:
        """Replace what the sequences have kept."""
        self.inputs[kept.rows], self.state[kept.rows] = inputs, state

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence to another row."""
        for memory in (self.inputs, self.state):
            memory[target] = memory[source]

    def copy(self, row: int, length: int) -> torch.Tensor:
        """Raises `AssertionError`: a state is not of any other length than its sequence's."""
        raise AssertionError("`Cache.bytes_of` says that nothing can be copied")

    def restore(self, row: int, kept: torch.Tensor, length: int) -> None:
        """Like `copy`."""
        raise AssertionError("`Cache.bytes_of` says that nothing can be copied")
