"""What all tests share: worker processes, started once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks of a test share two cores

from collections.abc import Iterator

import pytest

from meshwright.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks in any number, kept for the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
