"""KV cache of sequences that are being continued: lengths may differ, and all new tokens form one flat row.

A forward pass takes the concatenated new tokens of some sequences, [1, N], so that products see one batch of N rows and
nothing is padded: first one token for each sequence in decoding, then parts of prompts. Only attention knows which
token belongs to which sequence.

Shapes: M sequences (rows of the cache), P of them that get one token, N new tokens, H heads, G key and value heads, R =
H / G query heads that share one, T new tokens of one sequence, S keys, C room for keys, K head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from meshwright.models.batch import TensorBatch
from meshwright.models.masks import attention_mask
from meshwright.spec.batch import Batch

if TYPE_CHECKING:
    from meshwright.models.attention import Core
    from meshwright.models.decoder import Decoder

ROOM = 64
"""Capacity for keys at least doubles when it grows, to a multiple of this."""
KEYS = 16
"""Where lengths differ, keys are read up to a multiple of this."""


@dataclass(frozen=True)
class Part:
    """Several new tokens of one sequence."""

    row: int
    begin: int
    """Their start among all new tokens."""
    start: int
    """Number of tokens of the sequence before them."""
    stop: int
    mask: torch.Tensor | None

    @property
    def end(self) -> int:
        """Their end among all new tokens."""
        return self.begin + self.stop - self.start


@dataclass(frozen=True)
class Step:
    """Which tokens attend to which keys in one forward pass."""

    singles: int
    """Number of sequences that get one token: the first new tokens, of the first rows."""
    rows: torch.Tensor
    """Cache rows of those sequences, int64 [P]."""
    places: torch.Tensor
    """Positions of the tokens in their sequences, int64 [P]."""
    keys: slice
    """Which keys those P read."""
    mask: torch.Tensor | None
    """Added to their scores, [P, 1, 1, S]."""
    parts: tuple[Part, ...]
    """The others."""


class LayerCache:
    """One layer's keys and values, [M, G, C, K] each; `Cache.append` describes the next forward pass."""

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        self.keys_MGCK = self.values_MGCK = torch.empty(0)

    def attend(self, core: "Core", q_1HNK: torch.Tensor, k_1GNK: torch.Tensor, v_1GNK: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values; return the heads' outputs [1, H, N, K] for the new tokens."""
        self._make_room(k_1GNK)
        step = self._cache.step
        found = [self._attend_singles(step, q_1HNK, k_1GNK, v_1GNK)] if step.singles else []
        for part in step.parts:
            new, kept = slice(part.begin, part.end), slice(part.start, part.stop)
            self.keys_MGCK[part.row, :, kept] = k_1GNK[0, :, new]
            self.values_MGCK[part.row, :, kept] = v_1GNK[0, :, new]
            k_1GSK, v_1GSK = (x[part.row, :, : part.stop][None] for x in (self.keys_MGCK, self.values_MGCK))
            found.append(core(q_1HNK[:, :, new], k_1GSK, v_1GSK, part.mask))
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _attend_singles(
        self, step: Step, q_1HNK: torch.Tensor, k_1GNK: torch.Tensor, v_1GNK: torch.Tensor
    ) -> torch.Tensor:
        """One query a sequence. Heads that share keys take the query dim, so that no key is repeated."""
        count, groups = step.singles, k_1GNK.shape[1]
        self.keys_MGCK[step.rows, :, step.places] = k_1GNK[0, :, :count].transpose(0, 1)
        self.values_MGCK[step.rows, :, step.places] = v_1GNK[0, :, :count].transpose(0, 1)
        k_PGSK, v_PGSK = self.keys_MGCK[:count, :, step.keys], self.values_MGCK[:count, :, step.keys]
        q_PGRK = q_1HNK[0, :, :count].transpose(0, 1).unflatten(1, (groups, -1))
        y_PGRK = F.scaled_dot_product_attention(q_PGRK, k_PGSK, v_PGSK, attn_mask=step.mask)
        return y_PGRK.flatten(1, 2).transpose(0, 1)[None]

    def _make_room(self, k_1GNK: torch.Tensor) -> None:
        rows, capacity = self._cache.rows, self._cache.capacity
        if self.keys_MGCK.dim() == 4 and self.keys_MGCK.shape[0] >= rows and self.keys_MGCK.shape[2] >= capacity:
            return
        _, groups, _, width = k_1GNK.shape

        def grown(old_MGCK: torch.Tensor) -> torch.Tensor:
            # Zeros, because masked values are multiplied by zero and must not be NaN.
            new_MGCK = k_1GNK.new_zeros(rows, groups, capacity, width)
            if old_MGCK.dim() == 4:
                new_MGCK[: old_MGCK.shape[0], :, : old_MGCK.shape[2]] = old_MGCK
            return new_MGCK

        self.keys_MGCK, self.values_MGCK = grown(self.keys_MGCK), grown(self.values_MGCK)


class Cache:
    """The sequences, and every layer's keys and values for them. Capacity grows with them."""

    step: Step

    def __init__(self, model: "Decoder") -> None:
        self._window, self._like = model.spec.sliding_window, model.like
        self.layers = {key: LayerCache(self) for key in model.layers}
        self.lengths: list[int] = []
        """Tokens of each sequence, including those of the step in progress."""
        self.rows = self.capacity = 0

    def append(self, new: Sequence[tuple[int, Sequence[int]]]) -> TensorBatch:
        """Begin a step that reads new tokens, (row, tokens) each, and return the batch for `Decoder.forward`.

        A new row begins a sequence. Sequences that get one token come first, as rows 0, 1, ...; in other rows, or
        later, they are read one by one.
        """
        singles = 0
        while singles < len(new) and len(new[singles][1]) == 1 and new[singles][0] == singles:
            singles += 1
        starts, begin, parts = [], 0, []
        for index, (row, tokens) in enumerate(new):
            self.lengths += [0] * (row + 1 - len(self.lengths))
            start = self.lengths[row]
            starts.append(start)
            self.lengths[row] = stop = start + len(tokens)
            if index >= singles:
                mask = attention_mask(len(tokens), stop, window=self._window, device=self._like.device)
                parts.append(Part(row, begin, start, stop, mask))
            begin += len(tokens)
        self._grow()
        self.step = self._begin(starts[:singles], tuple(parts))
        return self._batch(new, starts)

    def move(self, source: int, target: int) -> None:
        """Put the sequence in row `source` into row `target`."""
        length = self.lengths[target] = self.lengths[source]
        for layer in self.layers.values():
            for kept in (layer.keys_MGCK, layer.values_MGCK):
                kept[target, :, :length] = kept[source, :, :length]

    def drop_last(self) -> None:
        """Forget the last row."""
        self.lengths.pop()

    def _batch(self, new: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int]) -> TensorBatch:
        tokens = [token for _, tokens in new for token in tokens]
        places = [start + index for start, (_, tokens) in zip(starts, new, strict=True) for index in range(len(tokens))]
        device = self._like.device
        return Batch(torch.tensor([tokens], device=device), position_ids=torch.tensor([places], device=device))

    def _begin(self, places: Sequence[int], parts: tuple[Part, ...]) -> Step:
        device, count = self._like.device, len(places)
        first = 0 if self._window is None else max(0, min(places, default=0) + 1 - self._window)
        last = max(places, default=0) + 1
        places_P = torch.tensor(places, device=device, dtype=torch.int64)
        mask_P11S = None
        if count and (min(places) + 1 < last or (self._window is not None and last - first > self._window)):
            last = min(-(-last // KEYS) * KEYS, self.capacity)
            keys_S, places_P1 = torch.arange(first, last, device=device), places_P[:, None]
            seen_PS = keys_S <= places_P1
            if self._window is not None:
                seen_PS &= keys_S > places_P1 - self._window
            mask_P11S = torch.zeros_like(seen_PS, dtype=self._like.dtype).masked_fill_(~seen_PS, -torch.inf)
            mask_P11S = mask_P11S[:, None, None]
        rows_P = torch.arange(count, device=device)
        return Step(count, rows_P, places_P, slice(first, last), mask_P11S, parts)

    def _grow(self) -> None:
        if len(self.lengths) > self.rows:
            self.rows = max(len(self.lengths), 2 * self.rows)
        longest = max(self.lengths)
        if longest > self.capacity:
            self.capacity = -(-max(longest, 2 * self.capacity) // ROOM) * ROOM
