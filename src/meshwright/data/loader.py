"""The loader: the batches of each rank in each step.

Shapes: B samples of a microbatch, T tokens of a sample, P pairs of a sample.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import numpy as np

from meshwright.data.mixture import Mixture
from meshwright.data.packing import NO_LABEL, Sample, Samples, blank_sample
from meshwright.spec.batch import Batch, Pairs
from meshwright.spec.errors import UserError
from meshwright.spec.precision import BF16
from meshwright.spec.run import ResolvedRun

LENGTH_MULTIPLE = 8
"""Rows shortened or joined have a multiple of this many tokens, because kernels are faster on aligned rows."""

Padding = Literal["kept", "cut", "left_out"]
"""Treatment of positions after a row's last label, which in a causal model change neither loss nor gradient. cut: all
rows of a microbatch end with the longest; left_out: rows are joined into one, as separate documents."""


HostBatch = Batch[np.ndarray]
"""A batch in host memory."""


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """The part of all samples that one data-parallel rank reads, and its form."""

    rank: int = 0
    world_size: int = 1
    places: np.ndarray | None = None
    """The positions in a sample whose tokens this rank holds; None: all."""
    padding: Padding = "kept"

    @classmethod
    def of_run(cls, resolved: ResolvedRun, rank: int, places: np.ndarray | None = None) -> "BatchShare":
        """The share of data-parallel rank `rank` of a run."""
        world_size = resolved.run.layout.data_parallel
        return cls(rank=rank, world_size=world_size, places=places, padding=padding_of(resolved))


class Loader:
    """The training batches of one data-parallel rank, by step.

    Step s of every run with this seed sees the samples at positions [s G, s G + G) of one endless order, where G is the
    global batch. Rank r takes the r-th of world_size equal, contiguous parts, cut into microbatches. For every world
    size and micro batch, the ranks' microbatches in order are therefore the same samples in the same order. The step
    alone determines the position in the data.

    A thread reads the next step during the current one. Close the loader, or use it in `with`.
    """

    def __init__(
        self,
        samples: Samples | Mixture,
        share: BatchShare | None = None,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        numbered: bool = False,
    ):
        """Batches in sequences; without a `share`, one rank reads everything. `numbered`: whether tokens have their
        numbers in the order, which dropout uses.

        Raises UserError if they do not divide, or if the share's rank is not below its world size.
        """
        share = share or BatchShare()
        rank, world_size = share.rank, share.world_size
        if global_batch % (micro_batch * world_size):
            raise UserError(
                f"a global batch of {global_batch} sequences cannot be split over {world_size} data-parallel ranks "
                f"in microbatches of {micro_batch}: it must be a multiple of {micro_batch * world_size}"
            )
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} is not in 0 .. {world_size - 1}")
        self._mixture = samples if isinstance(samples, Mixture) else Mixture([samples])
        self._seed = seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._per_rank = global_batch // world_size
        self._share, self._numbered = share, numbered
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="meshwright-loader")
        self._ahead: tuple[int, Future[list[HostBatch]]] | None = None

    @classmethod
    def of_run(
        cls, samples: Samples | Mixture, resolved: ResolvedRun, rank: int, places: np.ndarray | None = None
    ) -> "Loader":
        """The loader of data-parallel rank `rank` of a run."""
        return cls(
            samples,
            BatchShare.of_run(resolved, rank, places),
            seed=resolved.run.training.seed,
            global_batch=resolved.global_batch,
            micro_batch=resolved.micro_batch,
            numbered=draws(resolved),
        )

    def microbatches(self, step: int) -> list[HostBatch]:
        """This rank's microbatches of a step; also starts to read the next step.

        Steps may be requested in any order. Raises the exceptions of the reading thread.
        """
        if self._ahead is not None and self._ahead[0] == step:
            batches = self._ahead[1].result()
        else:
            batches = self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return batches

    def positions(self, step: int) -> range:
        """This rank's positions of a step in the run's order, one per sample."""
        start = step * self._global_batch + self._share.rank * self._per_rank
        return range(start, start + self._per_rank)

    def close(self) -> None:
        """Stop reading ahead and wait for the thread."""
        self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int) -> list[HostBatch]:
        positions, places = self.positions(step), self._share.places
        samples = [self._mixture.sample(position, self._seed) for position in positions]
        microbatches = [slice(i, i + self._micro_batch) for i in range(0, self._per_rank, self._micro_batch)]
        batches = [_stack(samples[rows], places) for rows in microbatches]
        if self._numbered:
            length = len(samples[0].inputs)
            batches = [
                replace(batch, numbers=_numbers(positions[rows], length, places))
                for batch, rows in zip(batches, microbatches, strict=True)
            ]
        return [_repadded(batch, self._share.padding) for batch in batches]


def draws(resolved: ResolvedRun) -> bool:
    """Whether a run uses tokens' numbers for random draws: for dropout, or for rounding gradients to four bits."""
    return getattr(resolved.run.finetune, "dropout", 0) > 0 or resolved.run.training.rounds_at_random


def _numbers(positions: range, length: int, places: np.ndarray | None) -> np.ndarray:
    """The number of each token in the order of samples of this many tokens: int64 [B, T]."""
    starts_B1 = np.array(positions, dtype=np.int64)[:, None] * length
    return starts_B1 + (np.arange(length) if places is None else places)


def padding_of(resolved: ResolvedRun) -> Padding:
    """`kept`, unless rows are padded and nothing needs equal shapes or computes losses of tokens without a label.
    `left_out` if attention within documents is as fast as within rows: in fp32 on a GPU it is slower, and some models
    of transformers do not support it."""
    run, model = resolved.run, resolved.model
    whole = run.layout.data_parallel == run.layout.world_size and not run.training.compile and not model.num_experts
    if run.data.packing != "padded" or not whole:
        return "kept"
    return "left_out" if run.training.dtypes.compute.bytes == BF16.bytes and model.foreign is None else "cut"


def _repadded(batch: HostBatch, padding: Padding) -> HostBatch:
    match padding:
        case "kept":
            return batch
        case "cut":
            return _cut(batch)
        case "left_out":
            return _joined(batch) if batch.pairs is None else _cut(batch)
        case _:
            assert_never(padding)


def _cut(batch: HostBatch) -> HostBatch:
    """The batch without the columns after the last label."""
    assert batch.labels is not None
    labelled = np.flatnonzero((batch.labels != NO_LABEL).any(axis=0))
    last = int(labelled[-1]) + 1 if len(labelled) else 1
    length = min(-(-last // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, batch.labels.shape[1])
    pairs, columns = batch.pairs, replace(batch, pairs=None).map(lambda array: array[:, :length])
    return columns if pairs is None else replace(columns, pairs=replace(pairs, owners=pairs.owners[:, :length]))


def _joined(batch: HostBatch) -> HostBatch:
    """The rows joined into one row of documents, each up to its last label (at least one token)."""
    assert batch.labels is not None
    labelled_BT, places_T = batch.labels != NO_LABEL, np.arange(batch.labels.shape[1])
    used_BT = places_T < np.where(labelled_BT, places_T + 1, 1).max(axis=1, keepdims=True)
    begins_BT = np.repeat(places_T[None] == 0, len(used_BT), axis=0)
    if batch.document_ids is not None:
        begins_BT[:, 1:] |= batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    documents = begins_BT[used_BT].cumsum()
    room = 0, -len(documents) % LENGTH_MULTIPLE
    parts = (batch.tokens[used_BT], 0), (batch.labels[used_BT], NO_LABEL), (documents, documents[-1] + 1)
    tokens, labels, document_ids = (np.pad(part, room, constant_values=blank)[None] for part, blank in parts)
    joined = Batch(tokens, labels, document_ids)
    return joined if batch.numbers is None else replace(joined, numbers=np.pad(batch.numbers[used_BT], room)[None])


def evaluation_batches(
    samples: Samples, share: BatchShare | None = None, *, micro_batch: int, num_samples: int | None = None
) -> Iterator[HostBatch]:
    """Every sample once over all ranks, in order; or `num_samples` of them, evenly spaced. `share` as in `Loader`.

    Every rank gets the same number of microbatches, so that all make the same collective calls; blank samples without
    labels fill the end. Sums over labels and ranks are the same for every world size.
    """
    share = share or BatchShare()
    count = len(samples) if num_samples is None else min(len(samples), num_samples)
    for start in range(0, count, micro_batch * share.world_size):
        first = start + share.rank * micro_batch
        rows = [
            samples[i * len(samples) // count] if i < count else _blank_like(samples[0])
            for i in range(first, first + micro_batch)
        ]
        yield _repadded(_stack(rows, share.places), share.padding)


def _blank_like(sample: Sample) -> Sample:
    """A sample that adds nothing to a loss; for pairs of answers, one without a pair."""
    blank = blank_sample(len(sample.inputs))
    if sample.references is None:
        return blank
    return blank._replace(documents=np.zeros_like(blank.inputs), references=np.full_like(sample.references, np.nan))


def _stack(samples: Sequence[Sample], places: np.ndarray | None) -> HostBatch:
    document_ids = pairs = None
    if any(sample.documents is not None for sample in samples):
        one = np.zeros_like(samples[0].inputs)
        document_ids = np.stack([one if sample.documents is None else sample.documents for sample in samples])
    tokens, labels = np.stack([sample.inputs for sample in samples]), np.stack([sample.labels for sample in samples])
    if any(sample.references is not None for sample in samples):
        assert document_ids is not None
        owners = document_ids if places is None else document_ids[:, places]
        pairs = Pairs(owners, _side_by_side([sample.references for sample in samples]))
    if places is None:
        return Batch(tokens, labels, document_ids, None, pairs)
    position_ids = _positions(tokens, document_ids)[:, places]
    return Batch(tokens[:, places], labels[:, places], document_ids, position_ids, pairs)


def _side_by_side(rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """References of rows [B, P]; NaN if a row has fewer than the others."""
    together = np.full((len(rows), max(0 if row is None else len(row) for row in rows)), np.nan)
    for row, references in zip(together, rows, strict=True):
        if references is not None:
            row[: len(references)] = references
    return together


def _positions(tokens: np.ndarray, document_ids: np.ndarray | None) -> np.ndarray:
    """Each token's position in its document: int64 [B, T]."""
    indices = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if document_ids is None:
        return indices
    starts = np.ones_like(document_ids, dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return indices - np.maximum.accumulate(np.where(starts, indices, 0), axis=1)
