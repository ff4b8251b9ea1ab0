"""Packing: tokens cut into samples of inputs and labels.

Shapes: T positions of a sample.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, assert_never

import numpy as np

from meshwright.data.best_fit import Bins, assign_bins, best_fit
from meshwright.data.token_file import TokenFile
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError

NO_LABEL = -100
"""Label of a position that is not in the loss."""


class Sample(NamedTuple):
    """One sample: int64 arrays [T]."""

    inputs: np.ndarray
    labels: np.ndarray
    """The next tokens; NO_LABEL if there is nothing to predict."""
    documents: np.ndarray | None = None
    """If documents are separate: a number for each position, equal throughout a document and different from its
    neighbours'; padding is a separate document. None: the sample is one document."""
    references: np.ndarray | None = None
    """For pairs of answers, float64 [P]: as in `TokenFile`, NaN if the sample has no such pair."""


class Piece(NamedTuple):
    """Inputs: tokens `start` to `start + length - 1` of a stream; the token after each is its label."""

    start: int
    length: int


class Samples(Protocol):
    """The interface of a packing: a fixed number of samples with random access."""

    sequence_length: int
    """Tokens of a sample."""

    @property
    def num_tokens(self) -> int:
        """Number of positions that are not padding."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def pieces(self, index: int) -> Sequence[Piece]:
        """The pieces of the stream in sample `index`, in order; padding follows them."""
        ...


def build_samples(file: TokenFile, data: DataSpec, *, keep_tail: bool = False) -> Samples:
    """Tokens packed according to the recipe. `keep_tail` as in `ConcatenatedSamples`; the other packings lose
    nothing."""
    if file.is_pairs:
        return PairSamples(file, data.sequence_length, alone=data.packing == "padded")
    match data.packing:
        case "concatenated":
            borders = file if data.separate_documents else None
            return ConcatenatedSamples(
                file.tokens, data.sequence_length, keep_tail=keep_tail, borders=borders, trained=file.trained
            )
        case "best_fit":
            return BestFitSamples(file, data.sequence_length, separate=data.separate_documents, alone=False)
        case "padded":
            return BestFitSamples(file, data.sequence_length, separate=data.separate_documents, alone=True)
        case _:
            assert_never(data.packing)


class ConcatenatedSamples:
    """One stream cut every T = `sequence_length` tokens: sample i reads tokens iT to iT + T - 1, and its
    labels are iT + 1 to iT + T.

    Documents are joined, separated by the end-of-text token. Every token except the first is a label once; with
    separate documents, every token except each document's first. The tail of the stream that does not fill a sample
    (fewer than T labels) is left out, or with `keep_tail` becomes a padded last sample: labels NO_LABEL, inputs 0,
    which no earlier position can see.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        *,
        keep_tail: bool = False,
        borders: TokenFile | None = None,
        trained: np.ndarray | None = None,
    ):
        """`tokens` is a stream of any integer dtype, such as `TokenFile.tokens`; `borders` is their file if its
        documents are separate; `trained` as in `TokenFile`.

        Raises UserError if the stream is too short for one sample.
        """
        self.sequence_length = sequence_length
        self._tokens, self._borders, self._trained = tokens, borders, trained
        num_labels = max(len(tokens) - 1, 0)
        self._len = -(-num_labels // sequence_length) if keep_tail else num_labels // sequence_length
        self.num_tokens = min(num_labels, self._len * sequence_length)
        if not self._len:
            needed = 2 if keep_tail else sequence_length + 1
            raise UserError(
                f"the corpus has {len(tokens)} tokens, but one sample needs {needed}; add text, or lower "
                f"data.sequence_length={sequence_length}"
            )

    def __len__(self) -> int:
        return self._len

    def pieces(self, index: int) -> list[Piece]:
        """One piece."""
        if not 0 <= index < self._len:
            raise IndexError(f"sample {index} of {self._len}")
        start = index * self.sequence_length
        return [Piece(start, min(self.sequence_length, len(self._tokens) - 1 - start))]

    def __getitem__(self, index: int) -> Sample:
        sample = packed_sample(self._tokens, self.pieces(index), self.sequence_length, self._trained)
        return sample if self._borders is None else self._kept_apart(sample, *self.pieces(index)[0])

    def _kept_apart(self, sample: Sample, start: int, length: int) -> Sample:
        """The sample with its documents, without labels that are the first token of another document."""
        assert self._borders is not None
        documents_T = np.zeros_like(sample.inputs)
        document, stop = self._borders.document_at(start), start + length
        while (border := self._borders.start(document + 1)) < stop:
            documents_T[border - start :] += 1
            sample.labels[border - start - 1] = NO_LABEL
            document += 1
        if border == stop:
            sample.labels[length - 1] = NO_LABEL
        documents_T[length:] += 1
        return sample._replace(documents=documents_T)


class BestFitSamples:
    """Whole documents packed into samples by best-fit-decreasing bins (`best_fit`).

    Only documents longer than a sample are cut, every T labels. Every token except each document's first is a label
    once. The remaining positions are padding.
    """

    def __init__(self, file: TokenFile, sequence_length: int, *, separate: bool, alone: bool = False):
        """`separate`: separate the documents of a sample; `alone`: every document is its own sample.

        Raises UserError if no document has two tokens.
        """
        self.sequence_length = sequence_length
        self._file, self._separate = file, separate
        self._bins: Bins = best_fit(file.starts(), sequence_length, alone=alone)
        self.num_tokens = int(self._bins.lengths.sum(dtype=np.int64))
        if not len(self):
            raise UserError(f"{file.path}: no document has two tokens, so there is nothing to predict; add text")

    @property
    def fill(self) -> float:
        """Share of all positions that are not padding."""
        return self.num_tokens / (len(self) * self.sequence_length)

    def __len__(self) -> int:
        return len(self._bins.firsts) - 1

    def pieces(self, index: int) -> list[Piece]:
        """The bin's documents, the longest first."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        bin = slice(int(self._bins.firsts[index]), int(self._bins.firsts[index + 1]))
        pairs = zip(self._bins.starts[bin].tolist(), self._bins.lengths[bin].tolist(), strict=True)
        return [Piece(start, length) for start, length in pairs]

    def __getitem__(self, index: int) -> Sample:
        pieces = self.pieces(index)
        sample = packed_sample(self._file.tokens, pieces, self.sequence_length, self._file.trained)
        return _by_piece(sample, pieces) if self._separate else sample


class PairSamples:
    """Whole pairs packed into samples, or each in its own sample; documents are separate.

    Documents 2i and 2i + 1 of the file are the chosen and the rejected answer of pair i, each with its prompt. In a
    sample they are documents 0 and 1 of its first pair, 2 and 3 of its second, and padding comes last.
    """

    def __init__(self, file: TokenFile, sequence_length: int, *, alone: bool = False):
        """`alone`: every pair is its own sample."""
        self.sequence_length, self._file = sequence_length, file
        starts = file.starts()
        labels = np.diff(starts) - 1
        lengths = labels.reshape(-1, 2).sum(1)
        assert lengths.max(initial=0) <= sequence_length, "longer pairs are cut off or left out where they are encoded"
        self._starts, self._labels = starts[:-1].reshape(-1, 2), labels.reshape(-1, 2)
        bins = np.arange(len(lengths)) if alone else assign_bins(lengths, sequence_length)[0]
        order = np.argsort(bins, kind="stable")
        self.pairs = np.split(order, np.cumsum(np.bincount(bins))[:-1])
        """Numbers of the pairs of each sample."""
        self.num_pairs = len(lengths)
        """Pairs of all samples."""
        self.most = max(map(len, self.pairs))
        """Most pairs in a sample."""
        self.num_tokens = int(lengths.sum())
        self._references = np.zeros(self.num_pairs) if file.references is None else file.references

    def __len__(self) -> int:
        return len(self.pairs)

    def pieces(self, index: int) -> list[Piece]:
        """Both answers of each pair."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        places = (self._starts[self.pairs[index]].ravel(), self._labels[self.pairs[index]].ravel())
        return [Piece(int(start), int(length)) for start, length in zip(*places, strict=True)]

    def __getitem__(self, index: int) -> Sample:
        pieces = self.pieces(index)
        sample = packed_sample(self._file.tokens, pieces, self.sequence_length, self._file.trained)
        references = np.full(self.most, np.nan)
        references[: len(self.pairs[index])] = self._references[self.pairs[index]]
        return _by_piece(sample, pieces)._replace(references=references)


def packed_sample(
    tokens: np.ndarray, pieces: Sequence[Piece], sequence_length: int, trained: np.ndarray | None = None
) -> Sample:
    """Pieces of a stream joined, then padding; labels only if `trained` (None: everywhere) is 1."""
    sample = blank_sample(sequence_length)
    place = 0
    for start, length in pieces:
        window = tokens[start : start + length + 1]
        sample.inputs[place : place + length] = window[:-1]
        sample.labels[place : place + length] = window[1:]
        if trained is not None:
            sample.labels[place : place + length][trained[start + 1 : start + length + 1] == 0] = NO_LABEL
        place += length
    return sample


def _by_piece(sample: Sample, pieces: Sequence[Piece]) -> Sample:
    """The sample with its pieces as separate documents."""
    lengths = [piece.length for piece in pieces]
    lengths.append(len(sample.inputs) - sum(lengths))
    return sample._replace(documents=np.repeat(np.arange(len(lengths)), lengths))


def blank_sample(sequence_length: int) -> Sample:
    """A sample that adds nothing to a loss."""
    return Sample(np.zeros(sequence_length, np.int64), np.full(sequence_length, NO_LABEL, np.int64))
