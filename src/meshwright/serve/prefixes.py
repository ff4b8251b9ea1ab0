"""Keys and values of finished answers, for prompts that begin with the same tokens: a conversation's next turn.

Shapes: G key and value heads, L tokens, K head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.serve.readers import CachedReader

DEFAULT_BYTES = 256 * 2**20
"""Default size of the memory for them."""
SHORTEST = 16
"""Fewer equal tokens are recomputed."""


@dataclass(frozen=True, eq=False)
class _Kept:
    owner: object
    tokens: np.ndarray
    layers: Sequence[torch.Tensor]
    """Keys, then values, [2, G, L, K] each."""

    @property
    def num_bytes(self) -> int:
        return sum(both.nbytes for both in self.layers)

    def shared(self, owner: object, tokens: np.ndarray) -> int:
        """Number of equal tokens at the beginning."""
        if self.owner is not owner:
            return 0
        length = min(len(self.tokens), len(tokens))
        different = self.tokens[:length] != tokens[:length]
        return int(different.argmax()) if different.any() else length


class Prefixes:
    """The sequences that several models have read most recently; the least recently used is dropped first."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._kept = most_bytes, list[_Kept]()
        """The most recently used last."""
        self.reused = 0
        """Prompt tokens that did not have to be recomputed."""

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(kept.num_bytes for kept in self._kept)

    def clear(self) -> None:
        """Free all memory."""
        self._kept = []

    def keep(self, owner: object, tokens: Sequence[int], reader: CachedReader, row: int) -> None:
        """Copy the reader's keys and values for a row's first `tokens`, unless they are too few or too large."""
        read, size = np.array(tokens, dtype=np.int64), reader.bytes_of(len(tokens))
        if len(read) <= SHORTEST or not 0 < size <= self._most:
            return
        shared = [kept.shared(owner, read) for kept in self._kept]
        if any(length == len(read) for length in shared):
            return
        # A continuation replaces its sequence.
        kept = [one for one, length in zip(self._kept, shared, strict=True) if length < len(one.tokens)]
        while kept and sum(one.num_bytes for one in kept) + size > self._most:
            kept.pop(0)
        self._kept = kept
        self._kept.append(_Kept(owner, read, reader.copy(row, len(read))))

    def restore(self, owner: object, prompt: Sequence[int], reader: CachedReader, row: int) -> int:
        """Start a new row with the longest stored prefix of the prompt; returns the number of its tokens.

        The last token is never restored, because its logits are needed.
        """
        tokens = np.array(prompt[:-1], dtype=np.int64)
        shared = [kept.shared(owner, tokens) for kept in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        if best is None or shared[best] < SHORTEST:
            return 0
        self._kept.append(self._kept.pop(best))
        reader.restore(row, self._kept[-1].layers, shared[best])
        self.reused += shared[best]
        return shared[best]
