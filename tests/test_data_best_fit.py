"""Best-fit-decreasing bins: the same as one document at a time, no fitting document split, and fast for millions."""

import time

import numpy as np
import pytest

from meshwright.data import best_fit as module
from meshwright.data.best_fit import assign_bins, best_fit
from meshwright.data.packing import NO_LABEL, BestFitSamples, Piece
from tokens import token_file


def one_at_a_time(lengths, capacity):
    """The remaining room, by the definition of best-fit decreasing."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_bins_are_those_of_the_definition(capacity, seed):
    generator = np.random.default_rng((capacity, seed))
    lengths = np.minimum(1 + generator.geometric(3 / (capacity + 3), 500), capacity)
    bins, num_bins = assign_bins(lengths, capacity)
    filled = np.bincount(bins, lengths, minlength=num_bins)
    assert sorted(capacity - filled) == one_at_a_time(lengths.tolist(), capacity)


def file_of(lengths):
    """Documents of these lengths in tokens, all tokens different."""
    return token_file(np.arange(sum(lengths)), lengths)


@pytest.mark.parametrize("window", [3, 1 << 24])
def test_no_document_that_fits_is_split(window, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", window)
    generator = np.random.default_rng(0)
    lengths = [*generator.integers(0, 20, 200).tolist(), 8, 9, 10, 17, 18, 33]
    file, capacity = file_of(lengths), 8
    samples = BestFitSamples(file, capacity, separate=False)
    pieces = [piece for i in range(len(samples)) for piece in samples.pieces(i)]
    expected = []
    for document, length in enumerate(lengths):
        start, labels = file.start(document), max(0, length - 1)
        expected += [Piece(start + i, min(capacity, labels - i)) for i in range(0, labels, capacity)]
    assert sorted(pieces) == sorted(expected), "whole documents, and of long ones pieces that fill a bin"
    for i in range(len(samples)):
        found = [piece.length for piece in samples.pieces(i)]
        assert sum(found) <= capacity
        assert found == sorted(found, reverse=True)
    assert samples.num_tokens == sum(piece.length for piece in pieces)


def test_every_token_but_the_first_of_a_document_is_a_label_once():
    lengths = [5, 1, 3, 12, 2, 2, 7]
    file = file_of(lengths)
    samples = BestFitSamples(file, 6, separate=True)
    seen = []
    for inputs, labels, documents, *_ in (samples[i] for i in range(len(samples))):
        trained = labels != NO_LABEL
        np.testing.assert_array_equal(labels[trained], inputs[trained] + 1)
        seen += labels[trained].tolist()
        for number in set(documents.tolist()):
            (where,) = np.nonzero(documents == number)
            assert (np.diff(where) == 1).all()
            owners = {file.document_at(int(token)) for token in inputs[where][trained[where]]}
            assert len(owners) <= 1, "one document, or padding"
        assert len(set(documents[~trained].tolist()) & set(documents[trained].tolist())) == 0
    firsts = {file.start(document) for document in range(len(lengths))}
    assert sorted(seen) == [token for token in range(sum(lengths)) if token not in firsts]


def test_not_separate_has_no_documents():
    assert BestFitSamples(file_of([4, 4]), 6, separate=False)[0].documents is None


def test_nothing_to_predict():
    with pytest.raises(ValueError, match="no document has two tokens"):
        BestFitSamples(file_of([1, 1]), 6, separate=True)


def test_a_million_documents_take_seconds():
    """About half a second here; one document at a time would take minutes."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 2
    starts = np.append(0, np.cumsum(lengths))
    began = time.process_time()
    bins = best_fit(starts, 4096)
    assert time.process_time() - began < 10
    fill = bins.lengths.sum() / ((len(bins.firsts) - 1) * 4096)
    assert fill > 0.999
    assert bins.lengths.sum() == (lengths - 1).sum()
