"""Data of a proof: random tokens, so that no corpus or tokenizer is needed."""

import numpy as np

from meshwright.data.packing import NO_LABEL, Piece, Sample


class RandomSamples:
    """Random tokens; a varying share of labels is ignored, so that ranks and microbatches carry unequal token counts.

    With `documents` every row holds several separate documents, with `pairs` one or two pairs of answers.
    """

    def __init__(
        self,
        *,
        vocab: int,
        sequence_length: int,
        seed: int = 0,
        count: int = 64,
        documents: bool = False,
        pairs: bool = False,
    ) -> None:
        self.vocab, self.sequence_length, self.seed, self.count = vocab, sequence_length, seed, count
        self.documents, self.pairs = documents, pairs

    @property
    def num_tokens(self) -> int:
        """Positions of all samples."""
        return self.count * self.sequence_length

    def __len__(self) -> int:
        return self.count

    def pieces(self, index: int) -> list[Piece]:
        """One piece, which is in no file."""
        return [Piece(index * self.sequence_length, self.sequence_length)]

    def __getitem__(self, index: int) -> Sample:
        generator = np.random.default_rng((self.seed, index))
        tokens = generator.integers(0, self.vocab, self.sequence_length + 1)
        inputs_T, labels_T = tokens[:-1].copy(), tokens[1:].copy()
        labels_T[generator.random(self.sequence_length) < generator.random() / 2] = NO_LABEL
        if self.pairs:
            return self._pairs(Sample(inputs_T, labels_T), generator)
        documents_T = (generator.random(self.sequence_length) < 0.2).cumsum() if self.documents else None
        return Sample(inputs_T, labels_T, documents_T)

    def _pairs(self, sample: Sample, generator: np.random.Generator) -> Sample:
        """The sample as answers of random lengths, followed by padding."""
        answers = 2 * int(generator.integers(1, 3))
        borders = np.sort(generator.choice(np.arange(1, self.sequence_length), answers, replace=False))
        documents_T = np.searchsorted(borders, np.arange(self.sequence_length), side="right")
        sample.labels[np.append(borders - 1, np.arange(borders[-1], self.sequence_length))] = NO_LABEL
        references_P = np.full(2, np.nan)
        references_P[: answers // 2] = generator.normal(size=answers // 2)
        return sample._replace(documents=documents_T, references=references_P)
