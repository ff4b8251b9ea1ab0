"""The order of samples: a permutation for every size, seed and epoch, and no pattern in it."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from meshwright.data.order import permuted, sample_at


@pytest.mark.parametrize("size", [*range(1, 70), 97, 255, 256, 257, 1009, 4096, 5003])
@pytest.mark.every(1)
def test_every_index_once(size):
    for seed in (0, 1, 2**40):
        assert sorted(permuted(i, size, seed) for i in range(size)) == list(range(size))


def test_large_sizes_cost_no_more():
    size = 10**15 + 37
    images = [permuted(i, size, 3) for i in range(1000)]
    assert len(set(images)) == 1000
    assert all(0 <= image < size for image in images)
    # A mean of 1000 uniform draws lies within 4 standard errors of the middle.
    assert abs(np.mean(images) / size - 0.5) < 4 / np.sqrt(12 * 1000)


def test_only_indices_of_the_range():
    for index in (-1, 5):
        with pytest.raises(ValueError, match=r"not in 0 \.\. 4"):
            permuted(index, 5, 0)


@pytest.mark.parametrize("size", [2, 3, 5, 10, 17])
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.every(1)
def test_every_image_is_equally_likely(size, index):
    seeds = 2000
    counts = Counter(permuted(index % size, size, seed) for seed in range(seeds))
    expected = seeds / size
    chi_squared = sum((counts[image] - expected) ** 2 / expected for image in range(size))
    # Chi-squared with k degrees of freedom has mean k and variance 2 k.
    assert chi_squared < size - 1 + 4 * np.sqrt(2 * (size - 1))


def test_every_order_of_few_is_equally_likely():
    seeds = 3000
    orders = Counter(tuple(permuted(i, 3, seed) for i in range(3)) for seed in range(seeds))
    assert set(orders) == set(permutations(range(3)))
    for count in orders.values():
        assert abs(count - seeds / 6) < 4 * np.sqrt(seeds / 6)


def test_neighbours_stay_neighbours_by_chance_only():
    size, seeds = 10, 1000
    steps = np.array([np.diff([permuted(i, size, seed) for i in range(size)]) for seed in range(seeds)])
    # Each of the 9 neighbouring pairs has probability 1 / 10 to stay one step apart, up or down.
    for step in (-1, 1):
        expected = seeds * (size - 1) / size
        assert abs(np.count_nonzero(steps == step) - expected) < 4 * np.sqrt(expected)


def test_no_trend_and_no_runs():
    size = 5003
    images = np.array([permuted(i, size, 7) for i in range(size)])
    bound = 4 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < bound
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(images[:-lag], images[lag:])[0, 1]) < bound
    # Fixed points and followers (image of i + 1 is one more) are Poisson with mean 1.
    assert np.count_nonzero(images == np.arange(size)) < 7
    assert np.count_nonzero(np.diff(images) == 1) < 7


def test_epochs_have_their_own_orders():
    size = 101
    epochs = [[sample_at(epoch * size + i, size, 5) for i in range(size)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] == [permuted(i, size, 5) for i in range(size)]
    for a in range(4):
        for b in range(a):
            assert sum(x == y for x, y in zip(epochs[a], epochs[b], strict=True)) < 10, "orders agree by chance only"


def test_the_order_never_changes():
    """Resuming a run with a newer version must find the same data: these numbers are permanent."""
    assert [permuted(i, 10, 0) for i in range(10)] == [9, 5, 4, 3, 2, 1, 0, 7, 6, 8]
    assert [sample_at(p, 1000, 42) for p in (0, 1, 999, 1000, 123456789)] == [84, 77, 389, 986, 636]
