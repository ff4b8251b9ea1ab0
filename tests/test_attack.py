"""A short round of the standing attack (`make attack`), and its judge."""

import pytest

from attack.__main__ import Attacks, table
from attack.files import TARGETS
from attack.trial import FAILURES, Ended, judge

pytestmark = pytest.mark.slow

ROUND = 2
"""Trials of every kind of file; `make attack` has sixty times as many, and kills, disks and networks."""


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> Attacks:
    return Attacks(tmp_path_factory.mktemp("attack"))


@pytest.mark.parametrize("kind", [target.attack for target in TARGETS])
def test_damaged_files_are_survived_or_named(attacks: Attacks, kind: str) -> None:
    trials = list(attacks.kinds()[kind](ROUND, 0))
    assert len(trials) == ROUND
    assert not [trial for trial in trials if trial.fate in FAILURES], table(trials)


@pytest.mark.parametrize("kind", ["random recipes", "random records"])
def test_drawn_inputs_are_read_or_named(attacks: Attacks, kind: str) -> None:
    trials = list(attacks.kinds()[kind](10, 0))
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
