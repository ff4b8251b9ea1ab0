"""The loader: one order for every world size, exact at any step, read ahead in a thread."""

import threading

import numpy as np
import pytest

from meshwright.data.loader import BatchShare, Loader, evaluation_batches
from meshwright.data.packing import NO_LABEL, ConcatenatedSamples, Sample

T = 8


def numbered(count):
    """Samples whose first input is T times their number."""
    return ConcatenatedSamples(np.arange(count * T + 1), T)


def load(samples, step, *, world_size, micro_batch, seed=3, global_batch=12):
    """Sample numbers of a step: rank by rank, their microbatches in order."""
    seen = []
    for rank in range(world_size):
        with Loader(
            samples,
            BatchShare(rank=rank, world_size=world_size),
            seed=seed,
            global_batch=global_batch,
            micro_batch=micro_batch,
        ) as loader:
            batches = loader.microbatches(step)
        assert len(batches) == global_batch // world_size // micro_batch
        for batch in batches:
            assert batch.document_ids is None
            assert batch.tokens.shape == batch.labels.shape == (micro_batch, T)
            assert batch.tokens.dtype == batch.labels.dtype == np.int64
            np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
            seen += [int(first) // T for first in batch.tokens[:, 0]]
    return seen


def test_padded_rows_end_behind_the_longest_of_their_microbatch():
    """Rows of 40, 70 and no tokens; documents are cut with their rows, and the rest equals the start of the whole."""
    lengths, columns = (40, 70, 0), np.arange(128)
    samples = [
        Sample(columns, np.where(columns < n, columns + 1, NO_LABEL), (columns >= n).astype(int)) for n in lengths
    ]

    def read(micro_batch, padding):
        with Loader(samples, BatchShare(padding=padding), seed=0, global_batch=3, micro_batch=micro_batch) as loader:
            return loader.microbatches(0)

    (whole,) = read(3, "kept")
    (cut,) = read(3, "cut")
    assert cut.tokens.shape == (3, 72)
    assert cut.document_ids is not None
    for part, full in ((cut.tokens, whole.tokens), (cut.labels, whole.labels), (cut.document_ids, whole.document_ids)):
        np.testing.assert_array_equal(part, full[:, :72])
    assert sorted(batch.tokens.shape[1] for batch in read(1, "cut")) == [8, 40, 72]
    (joined,) = read(3, "left_out")
    assert joined.tokens.shape == (1, 112)  # 40 + 70 + 1 and one position of padding
    assert joined.document_ids is not None
    used = [max(1, int((row != NO_LABEL).sum())) for row in whole.labels]
    for part, full, blank in ((joined.tokens, whole.tokens, 0), (joined.labels, whole.labels, NO_LABEL)):
        together = np.concatenate([row[:length] for row, length in zip(full, used, strict=True)])
        np.testing.assert_array_equal(part[0], [*together, blank])
    np.testing.assert_array_equal(joined.document_ids[0], np.repeat([1, 2, 3, 4], [*used, 1]))


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (6, 1), (12, 1)])
def test_the_order_is_the_same_for_every_split(world_size, micro_batch):
    samples = numbered(50)
    for step in (0, 3, 4, 1000):
        expected = load(samples, step, world_size=1, micro_batch=4)
        assert load(samples, step, world_size=world_size, micro_batch=micro_batch) == expected


def test_every_epoch_sees_every_sample_once():
    samples = numbered(30)  # not a multiple of the batch: epochs begin inside steps
    seen = [sample for step in range(10) for sample in load(samples, step, world_size=2, micro_batch=2)]
    epochs = [seen[i : i + 30] for i in range(0, 120, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert load(samples, 0, world_size=1, micro_batch=1, seed=4) != seen[:12]


def test_steps_in_any_order():
    samples = numbered(50)
    with Loader(samples, seed=0, global_batch=4, micro_batch=2) as loader:
        in_order = [loader.microbatches(step) for step in range(6)]
        for step in (5, 0, 3, 3, 4, 1):
            for ours, first in zip(loader.microbatches(step), in_order[step], strict=True):
                np.testing.assert_array_equal((ours.tokens, ours.labels), (first.tokens, first.labels))


class Watched:
    """Samples that record the thread that reads them, and fail from a given read on."""

    sequence_length = T

    def __init__(self, fail_after=10**9):
        self.threads, self.fail_after = [], fail_after

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.threads.append(threading.current_thread())
        if len(self.threads) > self.fail_after:
            raise OSError("the disk is gone")
        return Sample(np.full(T, index), np.full(T, index))


def test_the_next_step_is_read_ahead():
    samples = Watched()
    loader = Loader(samples, seed=0, global_batch=4, micro_batch=2)
    for step in range(3):
        loader.microbatches(step)
    loader.close()
    here = [thread is threading.main_thread() for thread in samples.threads]
    assert here == [True] * 4 + [False] * (len(here) - 4), "only the first step is waited for"
    assert len(here) in (12, 16), "closing may drop the step that is still to be read"
    assert not any(thread.name.startswith("meshwright-loader") for thread in threading.enumerate())


def test_errors_of_the_thread_arrive():
    with Loader(Watched(fail_after=4), seed=0, global_batch=4, micro_batch=2) as loader:
        loader.microbatches(0)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.microbatches(1)


def test_batches_that_do_not_divide():
    with pytest.raises(ValueError, match="must be a multiple of 6"):
        Loader(numbered(5), BatchShare(world_size=3), seed=0, global_batch=8, micro_batch=2)
    with pytest.raises(ValueError, match="rank 3 is not in"):
        Loader(numbered(5), BatchShare(rank=3, world_size=3), seed=0, global_batch=6, micro_batch=2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 30, 100])
def test_evaluation_sees_every_token_once(world_size, num_tokens):
    tokens = np.arange(num_tokens)
    samples = ConcatenatedSamples(tokens, T, keep_tail=True)
    ranks = [
        list(evaluation_batches(samples, BatchShare(rank=rank, world_size=world_size), micro_batch=2))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1, "every rank runs the same number of microbatches"
    assert all(batch.tokens.shape == batch.labels.shape == (2, T) for batches in ranks for batch in batches)
    in_order = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    labels = np.concatenate([batch.labels for batch in in_order]).ravel()
    np.testing.assert_array_equal(labels[labels != NO_LABEL], tokens[1:])


def test_evaluation_of_a_part_is_evenly_spaced():
    samples = numbered(10)

    def seen(**limits):
        batches = evaluation_batches(samples, micro_batch=2, **limits)
        rows = [row for batch in batches for row in zip(batch.tokens, batch.labels, strict=True)]
        return [int(inputs_T[0]) // T for inputs_T, labels_T in rows if labels_T[0] != NO_LABEL]

    assert seen() == list(range(10))
    assert seen(num_samples=5) == [0, 2, 4, 6, 8]
    assert seen(num_samples=3) == [0, 3, 6]
    assert seen(num_samples=99) == list(range(10))
    assert seen(num_samples=0) == []


@pytest.mark.parametrize("padding", ["cut", "left_out"])
def test_evaluation_without_padding_asks_for_the_same_labels(padding):
    columns = np.arange(64)
    samples = [Sample(columns, np.where(columns < n, columns + 100 * n, NO_LABEL)) for n in (9, 50, 1, 30, 17)]
    samples = type("Rows", (list,), {"sequence_length": 64})(samples)

    def read(padding):
        shares = [BatchShare(rank=rank, world_size=2, padding=padding) for rank in (0, 1)]
        return [batch for share in shares for batch in evaluation_batches(samples, share, micro_batch=2)]

    whole, less = read("kept"), read(padding)
    for before, after in zip(whole, less, strict=True):
        assert after.tokens.size < before.tokens.size
        kept = after.labels != NO_LABEL
        np.testing.assert_array_equal(after.labels[kept], before.labels[before.labels != NO_LABEL])
        np.testing.assert_array_equal(after.tokens[kept], before.tokens[before.labels != NO_LABEL])
