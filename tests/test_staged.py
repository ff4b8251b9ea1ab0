"""Layouts whose messages go through host memory, as those of ranks that share one GPU do, against one process."""

from collections.abc import Iterator

import pytest

from meshwright.comm.staged import STAGED
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from test_equivalence import check


@pytest.fixture(scope="module")
def staged() -> Iterator[RankPool]:
    """Ranks whose only process groups are staged ones."""
    pool = RankPool(STAGED)
    yield pool
    pool.close()


@pytest.mark.every(6)
@pytest.mark.parametrize("strategy", sorted(set(LAYOUTS) - {"single"}))
def test_staged_messages_change_nothing(staged: RankPool, strategy: str) -> None:
    """Every strategy's loss, gradients and weights after a step equal one process's, in float64."""
    check(staged, strategy, accumulation=3)


@pytest.mark.slow
def test_ranks_that_are_no_forks(request: pytest.FixtureRequest) -> None:
    """As on a machine with a GPU."""
    pool = RankPool(STAGED, fresh=True)
    request.addfinalizer(pool.close)
    check(pool, "zero-2-tp")
