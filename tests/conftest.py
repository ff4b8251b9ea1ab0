"""What all tests share: worker processes, started once, and the choice of a fast tier."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="what `make test-fast` runs")
    parser.addoption("--slurm", action="store_true", help="what `make test-slurm` runs: it starts Slurm's daemons")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under --fast: no test that is marked slow, and of each test over several ranks its first case."""
    if not config.getoption("--fast"):
        return
    kept, seen = [], set()
    for item in items:
        test = item.nodeid.split("[")[0]
        over_ranks = "ranks" in getattr(item, "fixturenames", ())
        if not item.get_closest_marker("slow") and not (over_ranks and test in seen):
            kept.append(item)
        seen.add(test)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
