"""Inputs of a proof: random tokens, so that no corpus or tokenizer is needed, and weights without constants.

A constant hides which rank computed with it, so noise replaces a fresh model's constants: norm weights of one are equal
on every rank under any split, an adapter initialized to zero passes no gradient on, and a fresh router loads experts
evenly.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from meshwright.data.packing import NO_LABEL, Piece, Sample
from meshwright.models.init import draw_rows
from meshwright.parallel.materialize import RowSource
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import run_weights

NOISE = 0.2
"""Standard deviation of the noise added to constants."""

ADAPTER_NOISE = 0.05
"""The same for the zero matrix of an adapter, whose output is then about as large as its base's. Four times as much
saturates attention, and its rounding exceeds the tolerances."""

LOUD, QUIET = 2.0, 0.1
"""Factor of every other expert's routing weights, so that half of the experts get most tokens."""


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

    def pair_numbers(self) -> list[np.ndarray]:
        """The numbers of each sample's pairs, in order."""
        counts = [0 if sample.references is None else int((~np.isnan(sample.references)).sum()) for sample in self]
        return np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def _pairs(self, sample: Sample, generator: np.random.Generator) -> Sample:
        """The sample as answers of random lengths, followed by padding."""
        answers = 2 * int(generator.integers(1, 3))
        borders = np.sort(generator.choice(np.arange(1, self.sequence_length), answers, replace=False))
        documents_T = np.searchsorted(borders, np.arange(self.sequence_length), side="right")
        sample.labels[np.append(borders - 1, np.arange(borders[-1], self.sequence_length))] = NO_LABEL
        references_P = np.full(2, np.nan)
        references_P[: answers // 2] = generator.normal(size=answers // 2)
        return sample._replace(documents=documents_T, references=references_P)


def proof_weights(resolved: ResolvedRun) -> RowSource:
    """The run's weights with noise added to constants and with uneven routers. Pretrained weights, except adapters,
    stay unchanged. Collective if they come from a checkpoint."""
    weights, drawn = run_weights(resolved), resolved.run.model.weights != "pretrained"

    def read(row: Parameter, start: int, stop: int) -> torch.Tensor:
        values = weights(row, start, stop)
        if row.storage != "float" or not (drawn or row.adapter):
            return values
        if row.name.endswith("router.weight"):
            return values * _by_expert(start, stop).unsqueeze(1)
        constant = row.init in ("ones", "zeros") or (row.adapter and row.init == "row_norms")
        return values + _noise(row, start, stop).to(values) if constant else values

    return read


def _noise(row: Parameter, start: int, stop: int) -> torch.Tensor:
    size = ADAPTER_NOISE if row.adapter and row.init == "zeros" else NOISE
    return draw_rows(replace(row, init="normal", init_std=size), 0, start, stop)


def _by_expert(start: int, stop: int) -> torch.Tensor:
    return torch.where(torch.arange(start, stop) % 2 == 0, LOUD, QUIET)
