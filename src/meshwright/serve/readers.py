"""Readers of a batch's rows: with a KV cache, or by rerunning whole rows for every token.

Shapes: B rows that get a token, N new tokens, T longest row, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from meshwright.families import FAMILIES
from meshwright.models import Cache, Decoder
from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.spec.batch import Batch

New = Sequence[tuple[int, Sequence[int]]]
"""(row, new tokens) of every row, in the order of rows."""


Reading = tuple[torch.Tensor, torch.Tensor]
"""Logits and hidden states."""


class Reader(Protocol):
    """The rows of tokens in a model."""

    def read(self, new: New, writing: int, scored: Sequence[int] = ()) -> torch.Tensor:
        """The logits [B, V] at the end of each of the first `writing` rows, after reading `new`; then those after every
        new token of the entries of `new` whose numbers are in `scored`."""
        ...

    def read_hidden(self, new: New, writing: int, scored: Sequence[int] = ()) -> Reading:
        """The same, and the last hidden states [B, D] at the ends of the first `writing` rows."""
        ...

    def move(self, source: int, target: int) -> None:
        """Move row `source` to the slot of row `target`."""
        ...

    def drop_last(self) -> None:
        """Drop the last row."""
        ...


class CachedReader(Cache):
    """Reads every token once, with a KV cache."""

    def __init__(self, model: Decoder, multiple: int = 1) -> None:
        """`multiple`: a step reads a multiple of this many tokens, because that many ranks split them."""
        super().__init__(model, multiple)
        self._model = model

    def read(self, new: New, writing: int, scored: Sequence[int] = ()) -> torch.Tensor:
        """Logits of the new tokens; a compiled step computes them if every row has one."""
        if self._model.next_step is None or not writing or scored:
            return self.read_hidden(new, writing, scored)[0]
        batch = self.append(new)
        if self.step.singles == len(new):
            return self._model.next_step(batch, self)[:writing]
        return self._compute(batch, new, writing, scored)[0]

    def read_hidden(self, new: New, writing: int, scored: Sequence[int] = ()) -> Reading:
        """Logits and hidden states of the new tokens."""
        return self._compute(self.append(new), new, writing, scored)

    def _compute(self, batch: TensorBatch, new: New, writing: int, scored: Sequence[int]) -> Reading:
        ends = list(accumulate(len(tokens) for _, tokens in new))
        places = [end - 1 for end in ends[:writing]]
        for number in scored:
            places += range(ends[number] - len(new[number][1]), ends[number])
        places_B = torch.tensor(places, device=batch.tokens.device, dtype=torch.int64)

        def both(x_1ND: torch.Tensor, head: Head, _: object) -> Reading:
            # Over several processes each has the hidden states of some tokens; nobody asks for them there.
            split = head.split.vocabulary is not None
            return head.logits_at(x_1ND, places_B), x_1ND[0, :0] if split else x_1ND[0, places_B[:writing]]

        return self._model(batch, both, cache=self)


class WholeReader:
    """Reruns every row for every token: works for any model with a forward pass."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def read(self, new: New, writing: int, scored: Sequence[int] = ()) -> torch.Tensor:
        """Logits of whole rows."""
        return self.read_hidden(new, writing, scored)[0]

    def read_hidden(self, new: New, writing: int, scored: Sequence[int] = ()) -> Reading:
        """See `Reader`. Padding follows the rows, so that no token sees it."""
        for place, tokens in new:
            if place == len(self._rows):
                self._rows.append([])
            self._rows[place] = [*self._rows[place], *tokens]
        logits_BV, hidden_BD = self._at_ends(self._rows[:writing])
        logits = [logits_BV]
        for place, tokens in (new[number] for number in scored):
            row_1T = torch.tensor([self._rows[place]], device=self._model.like.device)
            logits.append(self._model(Batch(row_1T), lambda x_BTD, head, _: head.logits(x_BTD))[0, -len(tokens) :])
        return torch.cat(logits), hidden_BD

    def _at_ends(self, rows: Sequence[Sequence[int]]) -> Reading:
        device = self._model.like.device
        if not rows:
            return torch.empty(0, self._model.spec.vocab, device=device), torch.empty(0, device=device)
        lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
        longest = max(map(len, rows))
        tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        asked_BT = torch.arange(longest, device=device) == lengths_B1 - 1

        def both(x_BTD: torch.Tensor, head: Head, _: object) -> Reading:
            return head.next_logits(x_BTD, asked_BT), x_BTD[asked_BT]

        return self._model(Batch(tokens_BT), both)

    def move(self, source: int, target: int) -> None:
        """Copy a row's tokens."""
        self._rows[target] = self._rows[source]

    def drop_last(self) -> None:
        """Drop the last row's tokens."""
        self._rows.pop()


PROBE = 12
"""Tokens of the test whether a user's own model can be cached."""


def reader_for(model: Decoder) -> Reader:
    """The reader for a model. Models computed by transformers have no cache here. A user's own blocks may mix tokens
    outside attention; a test of their logits detects this."""
    if model.make_reader is not None:
        return model.make_reader(model)
    if model.spec.foreign is not None:
        return WholeReader(model)
    if model.spec.family not in FAMILIES and not _may_be_cached(model):
        return WholeReader(model)
    return CachedReader(model)


@torch.inference_mode()
def _may_be_cached(model: Decoder) -> bool:
    """Whether tokens read one by one have the same logits as tokens read together."""
    tokens = [number % model.spec.vocab for number in range(3, 3 + min(PROBE, model.spec.max_positions))]
    whole, pieces = WholeReader(model), CachedReader(model)
    expected_BV = whole.read([(0, tokens)], 1)
    pieces.read([(0, tokens[:-2])], 0)
    pieces.read([(0, tokens[-2:-1])], 0)
    found_BV = pieces.read([(0, tokens[-1:])], 1)
    tolerance = 1e-4 if model.like.dtype.itemsize >= 4 else 3e-2
    return bool((found_BV - expected_BV).norm() <= tolerance * expected_BV.norm())
