"""Mixtures: exact shares at every point, separate epochs for every stream, and no state."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from meshwright.data.loader import BatchShare, Loader
from meshwright.data.mixture import JoinedSamples, Mixture, mean_context
from meshwright.data.packing import BestFitSamples, ConcatenatedSamples, build_samples
from meshwright.data.prepare import Corpus, TokenStream
from meshwright.data.tokenizer import train_tokenizer
from meshwright.spec.data import DataSpec
from tokens import token_file

T = 4


def numbered(count, stream=0):
    """Samples whose first input encodes stream and number."""
    return ConcatenatedSamples(1000 * stream + np.arange(count * T + 1), T)


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (5, 1, 1), (0.999, 0.001), (1, 2, 3, 4, 5, 6)])
def test_shares_are_exact_at_every_point(weights):
    streams = [numbered(10 + 7 * i) for i in range(len(weights))]
    mixture = Mixture(streams, weights)
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    seen = Counter()
    for position in range(2000):
        seen[mixture.locate(position, 0)[0]] += 1
        for stream, share in enumerate(shares):
            assert abs(seen[stream] - (position + 1) * share) < len(weights)
    assert mixture.counts(2000) == [seen[stream] for stream in range(len(weights))]
    for total in (10**6, 10**15):
        for count, share in zip(mixture.counts(total), shares, strict=True):
            assert abs(count - total * share) < len(weights)


def test_without_weights_every_sample_is_seen_once_an_epoch():
    streams = [numbered(count) for count in (1, 13, 4, 30)]
    mixture = Mixture(streams)
    for epoch in range(3):
        seen = Counter(mixture.locate(48 * epoch + i, 5) for i in range(48))
        assert seen == {(s, i): 1 for s, stream in enumerate(streams) for i in range(len(stream))}
    assert mixture.epochs(96) == [2.0] * 4


def test_streams_have_epochs_of_their_own():
    mixture = Mixture([numbered(3), numbered(50)], (1, 1))
    first = [index for stream, index in (mixture.locate(p, 0) for p in range(60)) if stream == 0]
    epochs = [first[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert mixture.epochs(60) == [10.0, 0.6]
    same_size = Mixture([numbered(50), numbered(50)])
    orders = [[index for s, index in (same_size.locate(p, 0) for p in range(100)) if s == stream] for stream in (0, 1)]
    assert orders[0] != orders[1], "each stream has a permutation of its own"


def test_one_stream_is_as_if_alone():
    """Adding a stream after another does not change the other's order."""
    alone, both = Mixture([numbered(20)]), Mixture([numbered(20), numbered(7)], (3, 1))
    order = [both.locate(position, 3) for position in range(80)]
    assert [index for stream, index in order if stream == 0] == [alone.locate(position, 3)[1] for position in range(60)]


def test_shares_are_of_tokens_not_of_samples():
    """A stream with half-empty samples needs twice as many."""
    half = BestFitSamples(token_file(np.arange(60), [3] * 20), T, separate=False)
    full = BestFitSamples(token_file(np.arange(100), [5] * 20), T, separate=False)
    assert (half.fill, full.fill) == (1.0, 1.0)
    odd = BestFitSamples(token_file(np.arange(80), [4] * 20), T, separate=False)
    assert odd.fill == 0.75
    mixture = Mixture([odd, full], (1, 1))
    for total in (7, 70, 700):
        odd_count, full_count = mixture.counts(total)
        assert abs(odd_count * 3 - full_count * 4) <= 4, "three tokens a sample here, four there"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_loader_mixes_the_same_for_every_world_size(world_size):
    mixture = Mixture([numbered(9), numbered(5, stream=1)], (2, 1))
    wanted = [mixture.sample(position, 6).inputs[0] for position in range(8, 16)]
    seen = []
    for rank in range(world_size):
        with Loader(
            mixture, BatchShare(rank=rank, world_size=world_size), seed=6, global_batch=8, micro_batch=2
        ) as loader:
            seen += itertools.chain.from_iterable(batch.tokens[:, 0] for batch in loader.microbatches(1))
    assert seen == wanted


@pytest.mark.parametrize("packing", ["concatenated", "best_fit"])
@pytest.mark.parametrize("weights", [(None, None), (1, 3)])
def test_the_mean_context_is_that_of_the_tokens(packing, weights):
    """Compared with a count over all samples; `concatenated` leaves out the last."""
    generator = np.random.default_rng(0)
    files = []
    for count in (200, 300):
        lengths = generator.integers(2, 60, count)
        lengths[-1] += (1 - lengths.sum()) % 32  # so that nothing is left out
        files.append(token_file(generator.integers(1, 50, lengths.sum()), lengths))
    streams = [
        TokenStream(name="s", train=file, held_out=None, weight=w) for file, w in zip(files, weights, strict=True)
    ]
    corpus = Corpus(tokenizer=train_tokenizer(["."], 257), streams=tuple(streams))
    data = DataSpec(sequence_length=32, packing=packing, separate_documents=True)
    means, totals = [], []
    for file in files:
        samples = build_samples(file, data)
        documents = [
            (i, number)
            for i in range(len(samples))
            for number in samples[i].documents[: sum(piece.length for piece in samples.pieces(i))]
        ]
        counts = Counter(documents)
        means.append(sum(count**2 for count in counts.values()) / len(documents))
        totals.append(len(documents))
    expected = np.average(means, weights=totals if weights[0] is None else weights)
    assert mean_context(corpus, data) == pytest.approx(expected, rel=0.01)
    assert mean_context(corpus, data.model_copy(update={"separate_documents": False})) == 32


def test_joined_streams_follow_one_another():
    joined = JoinedSamples([numbered(2), numbered(1, stream=1), numbered(3, stream=2)])
    assert [int(joined[i].inputs[0]) for i in range(len(joined))] == [0, 4, 1000, 2000, 2004, 2008]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            joined[index]


def test_every_source_has_a_weight_or_none():
    with pytest.raises(ValueError, match=r"source b\.txt has no weight, but others have"):
        DataSpec.model_validate({"sources": [{"path": "a.txt", "weight": 1}, "b.txt"]})
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        DataSpec.model_validate({"sources": [{"path": "a.txt", "weight": 0}]})
