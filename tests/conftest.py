"""What all tests share: worker processes, started once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks of a test share two cores

from collections.abc import Iterator

import pytest

from meshwright.testing.ranks import RankPool


class _Pools:
    """Hands out a living pool, a new one where a failed case took the last with it."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    def get(self) -> RankPool:
        if self._pool is None or not self._pool.alive:
            self._pool = RankPool(4)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools: _Pools) -> RankPool:
    """Up to four gloo ranks."""
    return _pools.get()
