"""A short round of the standing attack (`make attack`), and tests of its verdicts."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from attack.__main__ import Attacks, table
from attack.files import TARGETS
from attack.trial import FAILURES, Ended, Trial, judge
from conftest import compute_with_one_thread

pytestmark = pytest.mark.slow

ROUND = 1
"""Trials for every kind of file; `make attack` runs a hundred times as many, and kills, disks and networks."""


_attacks: list[Attacks] = []
"""One, in the attacking process."""


def begin(folder: Path) -> None:
    """Make the attacked folder, in the attacking process."""
    compute_with_one_thread()
    _attacks.append(Attacks(folder))


def attack(kind: str, count: int) -> list[Trial]:
    """This many trials of a kind, in the attacking process."""
    return list(_attacks[0].kinds()[kind](count, 0))


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A separate process: trials are forks of it, and a fork of a process that has run other tests may inherit a lock
    that one of their threads held."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(begin, tmp_path_factory.mktemp("attack")).result()
        yield pool


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [target.attack for target in TARGETS])
def test_damaged_files_are_survived_or_named(attacker: ProcessPoolExecutor, kind: str) -> None:
    trials = attacker.submit(attack, kind, ROUND).result()
    assert len(trials) == ROUND
    assert not [trial for trial in trials if trial.fate in FAILURES], table(trials)


@pytest.mark.parametrize("kind", ["random recipes", "random records"])
def test_drawn_inputs_are_read_or_named(attacker: ProcessPoolExecutor, kind: str) -> None:
    trials = attacker.submit(attack, kind, 10).result()
    assert not [trial for trial in trials if trial.fate in FAILURES], table(trials)


TRACE = "Traceback (most recent call last)\n"


def test_the_judge() -> None:
    def fate(status: int | None, err: str = "", *, same: bool = False, checked: bool = True) -> str:
        return judge(Ended(status, "", err), same=same, names=("a.bin",), checked=checked)[0]

    assert fate(0, same=True) == "survived"
    assert fate(2, "error: a.bin is damaged") == "named"
    assert fate(0, checked=False) == "as written"
    assert fate(0) == "silent"
    assert fate(2, "error: something") == "vague"
    assert fate(2, f"error: a.bin\n{TRACE}") == fate(-11) == "trace"
    assert fate(None) == "hang"
