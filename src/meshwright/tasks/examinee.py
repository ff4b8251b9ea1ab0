"""An examinee: a model's log-probabilities of continuations under any layout, and its generated texts.

Shapes: B rows, T tokens of a row, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.data.loader import HostBatch
from meshwright.data.tokenizer import TextTokenizer
from meshwright.models.batch import TensorBatch, to_device
from meshwright.models.generate import Sampling
from meshwright.models.head import Head
from meshwright.models.logits import Logits
from meshwright.models.loss import IGNORED
from meshwright.parallel import Passes
from meshwright.parallel.data import release_gathered
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError

LENGTHS = 32
"""Rows are padded to a multiple of this many tokens."""

Ids = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class TaskShare:
    """This rank's part of each batch."""

    device: torch.device
    max_length: int
    """Most tokens of a row."""
    tokens_at_once: int
    """Tokens that a rank reads at a time."""
    multiple: int = 1
    """Rows have a multiple of this many tokens."""
    data_rank: int = 0
    """This rank's index among the `data_ranks` that read different rows."""
    data_ranks: int = 1
    places_of: Callable[[int], np.ndarray | None] = lambda length: None
    """The positions that this rank holds of a row of a given length; None: all."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The settings for generating a text."""

    max_tokens: int
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    stops: Sequence[str] = ()
    """The text ends before the first of these."""
    chat: bool = False
    """Whether the tokens that end the assistant's turn end the text."""


@dataclass(frozen=True)
class ContinuationScore:
    """A continuation's log-probability."""

    logprob: float
    """The log-probability in nats, summed over its tokens."""
    greedy: bool
    """Whether no other token was likelier than any of its tokens."""


@dataclass(frozen=True)
class Examinee:
    """A model with its tokenizer. On several ranks its methods are collective, and every rank gets the same results."""

    passes: Passes
    tokenizer: TextTokenizer
    share: TaskShare
    write: Callable[[Sequence[Ids], Writing], list[str]]
    """The text that the model generates after each prompt."""

    @property
    def max_length(self) -> int:
        """Most tokens of a row."""
        return self.share.max_length

    def logprobs(self, rows: Sequence[tuple[Ids, Ids]]) -> list[ContinuationScore]:
        """The log-probability of each (tokens, continuation). The beginning of a row that is too long is not read.

        Raises `UserError` if a continuation has no token, or has more than fit.
        """
        read = [_cut(before, continuation, self.max_length) for before, continuation in rows]
        ends: dict[tuple[int, ...], list[int]] = {}
        """Input -> the rows that need one token after it: they are computed together."""
        longer = []
        for number, (tokens, continuation) in enumerate(read):
            if len(continuation) == 1:
                ends.setdefault(tokens, []).append(number)
            else:
                longer.append(number)
        scores: dict[int, ContinuationScore] = {}
        texts = list(ends)
        for together, logits_V in self._read([(tokens, 1) for tokens in texts], _next_logits):
            logprobs_V = logits_V.double().log_softmax(-1)
            best = float(logprobs_V.max())
            for number in ends[texts[together]]:
                logprob = float(logprobs_V[read[number][1][0]])
                scores[number] = ContinuationScore(logprob, logprob >= best)
        whole = [(read[number][0], len(read[number][1])) for number in longer]
        labels = [read[number][1] for number in longer]
        for index, sums in self._read(whole, _sums, labels):
            logprob, missed = sums.tolist()
            scores[longer[index]] = ContinuationScore(logprob, missed == 0)
        release_gathered(self.passes.model)
        for others in gather_everywhere(scores):
            scores = {**scores, **others}
        return [scores[number] for number in range(len(rows))]

    def _read(
        self,
        rows: Sequence[tuple[tuple[int, ...], int]],
        read: Callable[[torch.Tensor, Head, TensorBatch], torch.Tensor],
        labels: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a row, result of `read`), if this rank has both. `rows`: tokens, and how many of the last positions
        are needed; `labels`: their tokens, or any if only the positions matter."""
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        parts: list[list[int]] = []

        def batches() -> Iterator[TensorBatch]:
            start = 0
            while start < len(order):
                length = self._length(len(rows[order[start]][0]))
                size = max(1, self.share.tokens_at_once // length)
                first = start + self.share.data_rank * size
                parts.append(order[first : min(first + size, start + size * self.share.data_ranks)])
                batch = self._batch([(*rows[i], labels[i] if labels else (0,)) for i in parts[-1]], size, length)
                yield to_device(batch, self.share.device)
                start += size * self.share.data_ranks

        for number, made in enumerate(self.passes.read(batches(), read)):
            yield from zip(parts[number], made, strict=False)  # later rows are blank

    def _length(self, longest: int) -> int:
        unit = self.share.multiple * ceil(LENGTHS / self.share.multiple)
        return max(longest, min(ceil(longest / unit) * unit, self.max_length))

    def _batch(self, rows: Sequence[tuple[Ids, int, Ids]], size: int, length: int) -> HostBatch:
        tokens_BT, labels_BT = np.zeros((size, length), np.int64), np.full((size, length), IGNORED, np.int64)
        for row, (tokens, count, labels) in enumerate(rows):
            tokens_BT[row, : len(tokens)] = tokens
            labels_BT[row, len(tokens) - count : len(tokens)] = labels
        places = self.share.places_of(length)
        if places is None:
            return Batch(tokens_BT, labels_BT)
        positions_BT = np.broadcast_to(places, (size, len(places))).copy()
        return Batch(tokens_BT[:, places], labels_BT[:, places], position_ids=positions_BT)


def ends_among(tokenizer: TextTokenizer, stops: Sequence[str]) -> set[int]:
    """The ids of those stop texts that are special tokens, which a generated text does not show."""
    numbers = (tokenizer.token_id(stop) for stop in stops if stop in tokenizer.special_tokens)
    return {number for number in numbers if number is not None}


def _cut(before: Ids, continuation: Ids, room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not continuation or not before:
        raise UserError("a task requests the log-probability of an empty text, or of a text without a prompt")
    if len(continuation) > room:
        raise UserError(f"a task's answer has {len(continuation)} tokens, but the model supports {room}")
    return (*before, *continuation)[:-1][-room:], tuple(continuation)


def _next_logits(x_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> torch.Tensor:
    """The logits [B, V] at the one position of each row that has a label."""
    assert batch.labels is not None
    return head.next_logits(x_BTD, batch.labels != IGNORED)


def _sums(x_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> torch.Tensor:
    """Each row's log-probability, and the number of its labels that are not the likeliest token, [B, 2]."""
    assert batch.labels is not None
    signed_BT = head.token_terms(x_BTD, batch.labels, _signed)
    missed_BT = signed_BT < 0
    return head.row_sums(torch.stack([-signed_BT.abs().double().sum(1), missed_BT.double().sum(1)], 1))


def _signed(logits: Logits, labels_C: torch.Tensor) -> torch.Tensor:
    """Log-probabilities; positive if the token is the likeliest, because only the likeliest can have probability 1."""
    logit_C = logits.of(labels_C)
    logprob_C = logit_C - logits.logsumexp()
    return torch.where(logit_C >= logits.maximum(), logprob_C.abs(), -logprob_C.abs())
