"""The one place that says which rank gets which tokens of which samples in which step.

Shapes: b samples of a microbatch, T tokens of a sample.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np

from meshwright.data.mixture import Mixture
from meshwright.data.packing import NO_LABEL, Sample, Samples, blank_sample
from meshwright.spec.run import ResolvedRun

LENGTH_MULTIPLE = 8
"""Rows of another length than the samples' have a multiple of so many tokens, for kernels like aligned rows."""

Padding = Literal["kept", "cut", "left_out"]
"""What becomes of positions behind a row's last label, which in a causal model change neither loss nor gradient. cut:
all rows of a microbatch end with the longest; left_out: they lie behind one another in one row, as documents that are
kept apart."""


class Microbatch(NamedTuple):
    """What a rank runs at once; int64 arrays [b, T], as in `Sample`."""

    inputs: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None = None
    """The documents that each row keeps apart; None: every row is read as one document."""
    positions: np.ndarray | None = None
    """Given where a rank holds only some of a row's tokens, which inputs and labels then are: each token's place in
    its document. `documents` are the whole row's even then, for attention asks which documents the other tokens are in.
    """
    owners: np.ndarray | None = None
    """Given with references: the document of each token that this rank holds."""
    references: np.ndarray | None = None
    """Of pairs of answers, float64 [b, P]: as in `Sample`, NaN where a row has no such pair."""


class Loader:
    """The training batches of one data-parallel rank, by step.

    Step s of every run with this seed sees the samples at positions [s G, s G + G) of one endless order, G
    being the global batch. Rank r takes the r-th of world_size equal runs of them, cut into microbatches:
    whatever the world size and micro batch, the ranks' microbatches one after another are the same samples
    in the same order. The step is all there is to a position in the data.

    While a step is being trained, a thread reads the next one. Close the loader, or use it in `with`.
    """

    def __init__(
        self,
        samples: Samples | Mixture,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        places: np.ndarray | None = None,
        padding: Padding = "kept",
    ):
        """Batches in sequences; `places` in a sample whose tokens this rank holds (default all).

        Raises ValueError when they do not divide, or `rank` is not below `world_size`.
        """
        if global_batch % (micro_batch * world_size):
            raise ValueError(
                f"a global batch of {global_batch} sequences does not split over {world_size} data-parallel "
                f"ranks in microbatches of {micro_batch}: it must be a multiple of {micro_batch * world_size}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 .. {world_size - 1}")
        self._mixture = samples if isinstance(samples, Mixture) else Mixture([samples])
        self._seed = seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._per_rank = global_batch // world_size
        self._rank, self._places = rank, places
        self._padding: Padding = padding
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="meshwright-loader")
        self._ahead: tuple[int, Future[list[Microbatch]]] | None = None

    @classmethod
    def of_run(
        cls, samples: Samples | Mixture, resolved: ResolvedRun, rank: int, places: np.ndarray | None = None
    ) -> "Loader":
        """What data-parallel rank `rank` of a run reads of `samples`."""
        return cls(
            samples,
            seed=resolved.run.training.seed,
            global_batch=resolved.global_batch,
            micro_batch=resolved.micro_batch,
            rank=rank,
            world_size=resolved.run.layout.data_parallel,
            places=places,
            padding=padding_of(resolved),
        )

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of a step; the step after it is then read ahead.

        Steps may be asked for in any order. Raises what reading raised.
        """
        if self._ahead is not None and self._ahead[0] == step:
            batches = self._ahead[1].result()
        else:
            batches = self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return batches

    def positions(self, step: int) -> range:
        """This rank's positions of a step in the run's order, one a sample."""
        start = step * self._global_batch + self._rank * self._per_rank
        return range(start, start + self._per_rank)

    def close(self) -> None:
        """Stop reading ahead and wait for the thread."""
        self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int) -> list[Microbatch]:
        samples = [self._mixture.sample(position, self._seed) for position in self.positions(step)]
        starts = range(0, self._per_rank, self._micro_batch)
        found = [_stack(samples[i : i + self._micro_batch], self._places) for i in starts]
        return [_repadded(batch, self._padding) for batch in found]


def padding_of(resolved: ResolvedRun) -> Padding:
    """Kept, unless rows are padded, and nothing asks for equal shapes or has losses of its own for tokens without
    label. Left out where attention to documents costs no more than to rows: in fp32 on a GPU it does, and some of
    transformers' models have none."""
    run, model = resolved.run, resolved.model
    whole = run.layout.data_parallel == run.layout.world_size and not run.training.compile and not model.num_experts
    if run.data.packing != "padded" or not whole:
        return "kept"
    return "left_out" if run.training.precision in ("bf16", "fp16") and model.foreign is None else "cut"


def _repadded(batch: Microbatch, padding: Padding) -> Microbatch:
    if padding == "kept":
        return batch
    return _cut(batch) if padding == "cut" or batch.references is not None else _joined(batch)


def _cut(microbatch: Microbatch) -> Microbatch:
    """The same without the columns behind the last label."""
    labelled = np.flatnonzero((microbatch.labels != NO_LABEL).any(axis=0))
    last = int(labelled[-1]) + 1 if len(labelled) else 1
    length = min(-(-last // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, microbatch.labels.shape[1])
    tokens = {name: getattr(microbatch, name) for name in ("inputs", "labels", "documents", "positions", "owners")}
    return microbatch._replace(**{name: array[:, :length] for name, array in tokens.items() if array is not None})


def _joined(microbatch: Microbatch) -> Microbatch:
    """The rows behind one another, each up to its last label (one token at least), in one row of documents."""
    labelled_bT, places_T = microbatch.labels != NO_LABEL, np.arange(microbatch.labels.shape[1])
    used_bT = places_T < np.where(labelled_bT, places_T + 1, 1).max(axis=1, keepdims=True)
    begins_bT = np.repeat(places_T[None] == 0, len(used_bT), axis=0)
    if microbatch.documents is not None:
        begins_bT[:, 1:] |= microbatch.documents[:, 1:] != microbatch.documents[:, :-1]
    documents = begins_bT[used_bT].cumsum()
    room = 0, -len(documents) % LENGTH_MULTIPLE
    parts = (microbatch.inputs[used_bT], 0), (microbatch.labels[used_bT], NO_LABEL), (documents, documents[-1] + 1)
    return Microbatch(*(np.pad(part, room, constant_values=blank)[None] for part, blank in parts))


def evaluation_batches(
    samples: Samples,
    *,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    num_samples: int | None = None,
    places: np.ndarray | None = None,
    padding: Padding = "kept",
) -> Iterator[Microbatch]:
    """Every sample once over all ranks, in order; or `num_samples` of them, evenly spaced. `places` and `padding` as in
    `Loader`.

    Every rank gets the same number of microbatches, so that all make the same collective calls: what is
    missing at the end are blank samples, without labels. Sums over labels and ranks are the same for every
    world size.
    """
    count = len(samples) if num_samples is None else min(len(samples), num_samples)
    for start in range(0, count, micro_batch * world_size):
        first = start + rank * micro_batch
        rows = [
            samples[i * len(samples) // count] if i < count else blank_sample(samples.sequence_length)
            for i in range(first, first + micro_batch)
        ]
        yield _repadded(_stack(rows, places), padding)


def _stack(samples: Sequence[Sample], places: np.ndarray | None) -> Microbatch:
    documents = None
    if any(sample.documents is not None for sample in samples):
        one = np.zeros_like(samples[0].inputs)
        documents = np.stack([one if sample.documents is None else sample.documents for sample in samples])
    inputs, labels = np.stack([sample.inputs for sample in samples]), np.stack([sample.labels for sample in samples])
    owners = references = None
    if any(sample.references is not None for sample in samples):
        owners = documents if places is None or documents is None else documents[:, places]
        references = _side_by_side([sample.references for sample in samples])
    if places is None:
        return Microbatch(inputs, labels, documents, None, owners, references)
    positions = _positions(inputs, documents)[:, places]
    return Microbatch(inputs[:, places], labels[:, places], documents, positions, owners, references)


def _side_by_side(rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """References of rows [b, P], NaN where one has fewer than the others."""
    together = np.full((len(rows), max(0 if row is None else len(row) for row in rows)), np.nan)
    for row, references in zip(together, rows, strict=True):
        if references is not None:
            row[: len(references)] = references
    return together


def _positions(inputs: np.ndarray, documents: np.ndarray | None) -> np.ndarray:
    """Each token's place in its document: int64 [b, T]."""
    indices = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    if documents is None:
        return indices
    starts = np.ones_like(documents, dtype=bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return indices - np.maximum.accumulate(np.where(starts, indices, 0), axis=1)
