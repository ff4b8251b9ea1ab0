"""KV cache of running sequences of different lengths; all new tokens form one flat row.

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
from meshwright.models.masks import Masks, attention_mask
from meshwright.models.sinks import single_queries
from meshwright.models.states import StateCache
from meshwright.spec.batch import Batch
from meshwright.spec.layers import GatedDeltaSpec, MixerSpec

if TYPE_CHECKING:
    from meshwright.models.attention import Core
    from meshwright.models.decoder import Decoder

ROOM = 64
"""Capacity for keys at least doubles when it grows, to a multiple of this."""
KEYS = 16
"""If lengths differ, the number of keys read is rounded up to a multiple of this."""


@dataclass(frozen=True)
class NewTokens:
    """Several new tokens of one sequence."""

    row: int
    begin: int
    """Their first index among all new tokens."""
    start: int
    """Number of tokens of the sequence before them."""
    stop: int
    masks: Masks
    """Their mask by the window of a layer."""

    @property
    def end(self) -> int:
        """The index after their last among all new tokens."""
        return self.begin + self.stop - self.start


@dataclass(frozen=True)
class KeysRead:
    """The keys that P tokens of different sequences attend to, in layers of one window."""

    keys: slice
    """The keys that are read."""
    mask: torch.Tensor | None
    """Added to their scores, [P, 1, 1, S]."""


@dataclass(frozen=True)
class CacheStep:
    """The tokens of one forward pass, and the keys that they attend to."""

    singles: int
    """Number of sequences that get one token: the first new tokens, of the first rows."""
    rows: torch.Tensor
    """Cache rows of those sequences, int64 [P]."""
    places: torch.Tensor
    """Positions of the tokens in their sequences, int64 [P]."""
    read: dict[int | None, KeysRead]
    """The keys read by these P tokens, by the window of a layer."""
    parts: tuple[NewTokens, ...]
    """The parts of all other sequences."""
    padding: int = 0
    """Trailing tokens that belong to no sequence."""


class LayerCache:
    """One layer's keys and values, [M, G, C, K] each; `Cache.append` describes the next forward pass."""

    def __init__(self, cache: "Cache", window: int | None) -> None:
        self._cache, self._window = cache, window
        self.both_2MGCK = torch.empty(0)
        """Keys, then values."""

    @property
    def step(self) -> CacheStep:
        """The forward pass in progress."""
        return self._cache.step

    def attend(
        self,
        core: "Core",
        q_1HNK: torch.Tensor,
        k_1GNK: torch.Tensor,
        v_1GNK: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values; return the heads' outputs [1, H, N, K] for the new tokens. `core` has the
        sinks, if there are any."""
        groups, step = k_1GNK.shape[1], self._cache.step
        q_NHK = q_1HNK[0].transpose(0, 1)
        new_N2GK = torch.cat((k_1GNK[0], v_1GNK[0])).transpose(0, 1)
        singles = step.singles
        outputs = []
        if singles:
            q_PGRK = q_NHK[:singles].unflatten(1, (groups, -1))
            y_PGRK = self.attend_singles(q_PGRK, new_N2GK[:singles], sinks_H)
            outputs = [y_PGRK.flatten(1, 2).transpose(0, 1)[None]]
        outputs += [self.attend_part(core, part, q_1HNK, new_N2GK) for part in step.parts]
        if step.padding:
            outputs.append(torch.zeros_like(q_1HNK[:, :, : step.padding]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def attend_singles(
        self, q_PGRK: torch.Tensor, new_P2GK: torch.Tensor, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store the keys and values of sequences that get one token; the outputs [P, G, R, K] of their queries. Heads
        that share keys take the query dim, so that no key is repeated."""
        step, (count, both, width) = self._cache.step, new_P2GK.shape
        self.make_room(both // 2, width, new_P2GK.dtype)
        places = self._cache.places(both // 2)
        self.both_2MGCK.view(-1, width).index_copy_(0, places, new_P2GK.reshape(-1, width))
        read = step.read[self._window]
        k_PGSK, v_PGSK = self.both_2MGCK[:, :count, :, read.keys].unbind()
        if sinks_H is not None:
            return single_queries(q_PGRK, k_PGSK, v_PGSK, read.mask, sinks_H)
        return F.scaled_dot_product_attention(q_PGRK, k_PGSK, v_PGSK, attn_mask=read.mask)

    def attend_part(self, core: "Core", part: NewTokens, q_1HNK: torch.Tensor, new_N2GK: torch.Tensor) -> torch.Tensor:
        """The same for one sequence of several new tokens: [1, H, T, K]."""
        self.make_room(new_N2GK.shape[1] // 2, new_N2GK.shape[2], new_N2GK.dtype)
        new = slice(part.begin, part.end)
        new_2GTK = new_N2GK[new].transpose(0, 1).unflatten(0, (2, -1))
        self.both_2MGCK[:, part.row, :, part.start : part.stop] = new_2GTK
        k_1GSK, v_1GSK = self.both_2MGCK[:, part.row, None, :, : part.stop].unbind()
        return core(q_1HNK[:, :, new], k_1GSK, v_1GSK, part.masks[self._window])

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of this length to another row."""
        self.both_2MGCK[:, target, :, :length] = self.both_2MGCK[:, source, :, :length]

    def copy(self, row: int, length: int) -> torch.Tensor:
        """The keys and values [2, G, length, K] of a sequence's first tokens."""
        return self.both_2MGCK[:, row, :, :length].clone()

    def restore(self, row: int, kept: torch.Tensor, length: int) -> None:
        """Start a row with the first `length` tokens of such a copy."""
        self.make_room(kept.shape[1], kept.shape[3], kept.dtype)
        self.both_2MGCK[:, row, :, :length] = kept[:, :, :length]

    def make_room(self, groups: int, width: int, dtype: torch.dtype) -> None:
        """Memory for the keys and values of every sequence of the step."""
        rows, capacity, old_2MGCK = self._cache.rows, self._cache.capacity, self.both_2MGCK
        if old_2MGCK.dim() == 5 and old_2MGCK.shape[1] >= rows and old_2MGCK.shape[3] >= capacity:
            return
        # Zeros, because masked values are multiplied by zero and must not be NaN.
        self.both_2MGCK = torch.zeros(2, rows, groups, capacity, width, dtype=dtype, device=self._cache.device)
        if old_2MGCK.dim() == 5:
            self.both_2MGCK[:, : old_2MGCK.shape[1], :, : old_2MGCK.shape[3]] = old_2MGCK


class Cache:
    """The sequences, and every layer's keys and values, or states, for them. Capacity grows with them."""

    step: CacheStep

    def __init__(self, model: "Decoder", multiple: int = 1) -> None:
        """`multiple`: each step's row is padded to a multiple of this many tokens, which ranks can split."""
        self._multiple = multiple
        self._windows, self._like = model.spec.windows, model.like
        self.layers = {key: self._layer(model.spec.layer(int(key)).mixer) for key in model.layers}
        self.lengths: list[int] = []
        """Tokens of each sequence, including those of the step in progress."""
        self.rows = self.capacity = 0
        self._places: dict[int, torch.Tensor] = {}

    def _layer(self, mixer: MixerSpec) -> "LayerCache | StateCache":
        return StateCache(self) if isinstance(mixer, GatedDeltaSpec) else LayerCache(self, mixer.window)

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self._like.device

    def places(self, groups: int) -> torch.Tensor:
        """The indices in a layer's memory of the keys, then the values, of each sequence that gets one token: int64 [P
        * 2 * G], in vectors of K."""
        if groups not in self._places:
            step, device = self.step, self._like.device
            kinds_2G = torch.arange(2, device=device).repeat_interleave(groups) * self.rows * groups
            groups_2G = torch.arange(groups, device=device).repeat(2)
            starts_P2G = step.rows[:, None] * groups + kinds_2G + groups_2G
            self._places[groups] = (starts_P2G * self.capacity + step.places[:, None]).flatten()
        return self._places[groups]

    def append(self, new: Sequence[tuple[int, Sequence[int]]]) -> TensorBatch:
        """Start a step that reads new tokens, (row, tokens) each, and return the batch for `Decoder.forward`.

        A new row starts a sequence. Sequences that get one token come first, as rows 0, 1, ...; in other rows, or
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
                parts.append(NewTokens(row, begin, start, stop, self._masks(len(tokens), stop)))
            begin += len(tokens)
        self._grow()
        self._places = {}
        self.step = self._begin(starts[:singles], tuple(parts), -begin % self._multiple)
        return self._batch(new, starts)

    def move(self, source: int, target: int) -> None:
        """Move the sequence in row `source` to row `target`."""
        length = self.lengths[target] = self.lengths[source]
        for layer in self.layers.values():
            layer.move(source, target, length)

    def drop_last(self) -> None:
        """Drop the last row."""
        self.lengths.pop()

    def copy(self, row: int, length: int) -> list[torch.Tensor]:
        """Every layer's keys and values of the first `length` tokens of a sequence, [2, G, length, K] each."""
        return [layer.copy(row, length) for layer in self.layers.values()]

    def restore(self, row: int, layers: Sequence[torch.Tensor], length: int) -> None:
        """Start a sequence in a new row with the first `length` tokens of such a copy."""
        self.lengths += [0] * (row + 1 - len(self.lengths))
        self.lengths[row] = length
        self._grow()
        for layer, kept in zip(self.layers.values(), layers, strict=True):
            layer.restore(row, kept, length)

    def bytes_of(self, length: int) -> int:
        """Bytes of such a copy; 0 if there can be none, because a layer has only the state after all tokens."""
        layers = [layer for layer in self.layers.values() if isinstance(layer, LayerCache)]
        if len(layers) < len(self.layers):
            return 0
        return length * sum(layer.both_2MGCK[:, :1, :, :1].nbytes for layer in layers)

    def _batch(self, new: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int]) -> TensorBatch:
        tokens = [token for _, tokens in new for token in tokens]
        places = [start + index for start, (_, tokens) in zip(starts, new, strict=True) for index in range(len(tokens))]
        tokens, places = ([*row, *[0] * self.step.padding] for row in (tokens, places))
        device = self._like.device
        return Batch(torch.tensor([tokens], device=device), position_ids=torch.tensor([places], device=device))

    def _masks(self, new: int, stop: int) -> Masks:
        """The mask by window of the last `new` of `stop` tokens."""
        return {one: attention_mask(new, stop, window=one, device=self.device) for one in self._windows}

    def _begin(self, places: Sequence[int], parts: tuple[NewTokens, ...], padding: int) -> CacheStep:
        places_P = torch.tensor(places, device=self.device, dtype=torch.int64)
        read = {window: self._read(places, places_P, window) for window in self._windows}
        return CacheStep(len(places), torch.arange(len(places), device=self.device), places_P, read, parts, padding)

    def _read(self, places: Sequence[int], places_P: torch.Tensor, window: int | None) -> KeysRead:
        first = 0 if window is None else max(0, min(places, default=0) + 1 - window)
        last = max(places, default=0) + 1
        mask_P11S = None
        if places and (min(places) + 1 < last or (window is not None and last - first > window)):
            last = min(-(-last // KEYS) * KEYS, self.capacity)
            keys_S, places_P1 = torch.arange(first, last, device=self.device), places_P[:, None]
            seen_PS = keys_S <= places_P1
            if window is not None:
                seen_PS &= keys_S > places_P1 - window
            mask_P11S = torch.zeros_like(seen_PS, dtype=self._like.dtype).masked_fill_(~seen_PS, -torch.inf)
            mask_P11S = mask_P11S[:, None, None]
        return KeysRead(slice(first, last), mask_P11S)

    def _grow(self) -> None:
        if len(self.lengths) > self.rows:
            self.rows = max(len(self.lengths), 2 * self.rows)
        longest = max(self.lengths)
        if longest > self.capacity:
            self.capacity = -(-max(longest, 2 * self.capacity) // ROOM) * ROOM
