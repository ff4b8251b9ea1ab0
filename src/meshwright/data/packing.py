"""The one place that cuts a stream of tokens into samples of inputs and labels.

Shapes: T tokens of a sample.
"""

from typing import NamedTuple, Protocol

import numpy as np

NO_LABEL = -100
"""Label of a position that is not in the loss."""


class Sample(NamedTuple):
    """One sample: int64 arrays [T]."""

    inputs: np.ndarray
    labels: np.ndarray
    """The next tokens; NO_LABEL where nothing is predicted."""
    documents: np.ndarray | None = None
    """Where documents are kept apart: a number for each position, the same throughout a document and another than
    its neighbours'; padding is a document of its own. None: the sample is read as one document."""


class Samples(Protocol):
    """What a packing offers: a fixed number of samples, each reachable at once."""

    sequence_length: int
    """Tokens of a sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class ConcatenatedSamples:
    """One stream cut every T = `sequence_length` tokens: sample i reads tokens iT to iT + T - 1, and its
    labels are iT + 1 to iT + T.

    Documents run into one another, parted by the end-of-text token, and may attend to one another. Every
    token but the first is a label once. The tail of the stream that does not fill a sample (fewer than T
    labels) is left out, or with `keep_tail` is a last sample, padded: labels NO_LABEL, inputs 0, which no
    earlier position can see.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, *, keep_tail: bool = False):
        """`tokens` is a stream of any integer dtype, such as `TokenFile.tokens`.

        Raises ValueError when it is too short for one sample.
        """
        self.sequence_length = sequence_length
        self._tokens = tokens
        num_labels = max(len(tokens) - 1, 0)
        self._len = -(-num_labels // sequence_length) if keep_tail else num_labels // sequence_length
        if not self._len:
            needed = 2 if keep_tail else sequence_length + 1
            raise ValueError(
                f"the corpus has {len(tokens)} tokens and one sample takes {needed}; "
                f"add text or lower data.sequence_length={sequence_length}"
            )

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._len:
            raise IndexError(f"sample {index} of {self._len}")
        start = index * self.sequence_length
        window = self._tokens[start : start + self.sequence_length + 1]
        sample = blank_sample(self.sequence_length)
        sample.inputs[: len(window) - 1] = window[:-1]
        sample.labels[: len(window) - 1] = window[1:]
        return sample


def blank_sample(sequence_length: int) -> Sample:
    """A sample that adds nothing to a loss."""
    return Sample(np.zeros(sequence_length, np.int64), np.full(sequence_length, NO_LABEL, np.int64))
