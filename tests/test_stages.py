"""Layers are cut into pipeline stages as evenly as possible."""

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from meshwright.families import resolve_model
from meshwright.families.flops import forward_flops_per_token
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.spec.model import ModelFields


def work(costs: list[float], sizes: tuple[int, ...]) -> tuple[float, float]:
    """(heaviest stage, sum of squares)."""
    cuts = [0, *np.cumsum(sizes)]
    stages = [sum(costs[a:b]) for a, b in pairwise(cuts)]
    return max(stages), sum(stage**2 for stage in stages)


def test_no_other_cut_is_better() -> None:
    """Compared with every possible cut, on random costs with one heavy end."""
    generator = np.random.default_rng(0)
    for layers in (3, 6, 9):
        for stages in range(1, layers + 1):
            costs = [float(cost) for cost in generator.integers(1, 9, layers)]
            costs[-1] += 7
            sizes = balanced_stages(costs, stages)
            assert (len(sizes), sum(sizes)) == (stages, layers)
            assert min(sizes) >= 1
            cuts = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
            every = [work(costs, tuple(b - a for a, b in pairwise(cut))) for cut in cuts]
            assert work(costs, sizes) == min(every)


def test_equal_layers_are_shared_out_evenly() -> None:
    assert balanced_stages([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sorted(balanced_stages([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert len(balanced_stages([1.0] * 126, 32)) == 32
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 pipeline stages; use at most 2"):
        balanced_stages([1.0] * 2, 3)


def test_the_head_weighs_in() -> None:
    """Llama 3.2 1B's head costs more than four of its layers."""
    spec = resolve_model(ModelFields(name="llama-3.2-1b"), base_dir=Path())
    costs = layer_costs(spec, 2048)
    assert sum(costs) == forward_flops_per_token(spec, 2048)
    assert costs[-1] > 4 * costs[0]
    assert balanced_stages(costs, 4) == (5, 5, 5, 1)
