"""The mixture: the stream and the sample at each position of a run."""

import bisect
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from meshwright.data.order import sample_at
from meshwright.data.packing import Piece, Sample, Samples, build_samples
from meshwright.data.prepare import Corpus
from meshwright.spec.data import DataSpec


class Mixture:
    """An endless sequence of samples with every stream's share exact at every point.

    Among the first n samples a stream of share w has n w, with an error below the number of streams. The stream at a
    position is computed from the position alone, in exact integers: of the samples shared by streams i, i + 1, ...,
    stream i takes the k-th if floor((k + 1) w) is one more than floor(k w), as Bresenham (1965) draws a line; the
    others go to the later streams.
    """

    def __init__(
        self, streams: Sequence[Samples], weights: Sequence[float | None] | None = None, *, shuffled: bool = True
    ):
        """`weights` are shares of tokens, in any unit; without weights, every sample of every stream is seen equally
        often. Each stream is reshuffled in every epoch (`shuffled`), or read in its own order.

        Token shares are converted to sample shares by the average fill of each stream's samples.
        """
        self.shuffled = shuffled
        self.streams = tuple(streams)
        self.weights = [None] * len(streams) if weights is None else list(weights)
        shares = [_samples_wanted(*pair) for pair in zip(self.streams, self.weights, strict=True)]
        # Each stream's share of the samples that remain for it and the later streams.
        self._takes = [share / sum(shares[i:]) for i, share in enumerate(shares)]

    def locate(self, position: int, seed: int) -> tuple[int, int]:
        """(number of the stream, sample of it) at `position`; each stream has its own epochs."""
        for number, take in enumerate(self._takes):
            before = take.numerator * position // take.denominator
            if take.numerator * (position + 1) // take.denominator > before:
                size = len(self.streams[number])
                return number, sample_at(before, size, seed, number) if self.shuffled else before % size
            position -= before
        raise AssertionError("the last stream takes all remaining samples")

    def sample(self, position: int, seed: int) -> Sample:
        """The sample at `position`."""
        stream, index = self.locate(position, seed)
        return self.streams[stream][index]

    def counts(self, num_positions: int) -> list[int]:
        """The number of samples of each stream among the first positions."""
        counts = []
        for take in self._takes:
            counts.append(take.numerator * num_positions // take.denominator)
            num_positions -= counts[-1]
        return counts

    def epochs(self, num_positions: int) -> list[float]:
        """The epochs of each stream after `num_positions`."""
        counts = zip(self.counts(num_positions), self.streams, strict=True)
        return [count / len(stream) for count, stream in counts]


class JoinedSamples:
    """The concatenated samples of several streams."""

    def __init__(self, streams: Sequence[Samples]):
        """At least one stream; all have the same sequence length."""
        self.sequence_length = streams[0].sequence_length
        self.streams = streams
        self._ends = list(accumulate(len(stream) for stream in streams))
        self.num_tokens = sum(stream.num_tokens for stream in streams)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        stream, index = self.locate(index)
        return self.streams[stream][index]

    def pieces(self, index: int) -> Sequence[Piece]:
        """The pieces of a sample, counted within its stream."""
        stream, index = self.locate(index)
        return self.streams[stream].pieces(index)

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the stream, sample of it)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        stream = bisect.bisect_right(self._ends, index)
        return stream, index - (self._ends[stream - 1] if stream else 0)


def training_samples(corpus: Corpus, data: DataSpec) -> Mixture:
    """The training samples of a run, packed and mixed as in its recipe."""
    streams = [build_samples(stream.train, data) for stream in corpus.streams]
    return Mixture(streams, [stream.weight for stream in corpus.streams], shuffled=data.order == "shuffled")


def mean_context(corpus: Corpus, data: DataSpec) -> float:
    """The mean length of a training token's attention context: its document, or piece of one, if documents are
    separate, else its sample."""
    if not data.separate_documents:
        return data.sequence_length
    tokens, contexts = [], []
    for stream in corpus.streams:
        borders = stream.train.starts()
        if data.packing == "concatenated":
            borders = np.union1d(borders, np.arange(0, borders[-1], data.sequence_length))
        lengths = np.maximum(np.diff(borders) - (data.packing != "concatenated"), 0)
        whole, rest = np.divmod(lengths, data.sequence_length)
        tokens.append(stream.weight or int(lengths.sum()))
        contexts.append((whole.sum() * data.sequence_length**2 + (rest**2).sum()) / max(1, lengths.sum()))
    return float(np.average(contexts, weights=tokens))


def held_out_samples(corpus: Corpus, data: DataSpec) -> JoinedSamples:
    """All held-out text, packed like the training samples, with nothing left out; it must not be empty."""
    return JoinedSamples([build_samples(file, data, keep_tail=True) for file in corpus.held_out])


def all_samples(corpus: Corpus, data: DataSpec) -> JoinedSamples:
    """All training text once, with nothing left out."""
    return JoinedSamples([build_samples(stream.train, data, keep_tail=True) for stream in corpus.streams])


def _samples_wanted(stream: Samples, weight: float | None) -> Fraction:
    if weight is None:
        return Fraction(len(stream))
    return Fraction(str(weight)) * len(stream) / stream.num_tokens
