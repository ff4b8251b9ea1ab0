"""Rows of the standing attack (`make attack`), its verdicts, and whether it notices planted faults."""

import inspect
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

import meshwright.serve.http
from attack.__main__ import Attacks
from attack.damage import ALL, BYTES, JSON
from attack.files import TARGETS
from attack.planted import PLANTED, noticed
from attack.report import cells_of, summary, tables
from attack.served import ENDPOINTS
from attack.trial import FAILURES, Ended, Trial, judge, trial_of
from conftest import compute_with_one_thread

pytestmark = pytest.mark.slow

_attacks: list[Attacks] = []
"""One, in the attacking process."""


def begin(folder: Path) -> None:
    """Make the attacked folder, in the attacking process."""
    compute_with_one_thread()
    _attacks.append(Attacks(folder))


def attack(kind: str, count: int) -> list[Trial]:
    """A round of a kind and `count` random trials, in the attacking process."""
    return list(_attacks[0].trials(kind, count, 0))


def attack_some(kind: str, of: int) -> list[Trial]:
    """Each `of`-th cell of a kind."""
    chosen = _attacks[0].tabular(kind)
    return [trial_of(chosen, f"{kind}/0/{number}") for number in range(0, len(chosen.cells()), of)]


def find(planted: str) -> list[Trial]:
    """The first two trials that a planted fault makes fail."""
    return list(islice(noticed(_attacks[0].tabular, planted), 2))


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
    trials = attacker.submit(attack_some, kind, 9).result()
    assert trials
    assert not [trial for trial in trials if trial.fate in FAILURES], tables(cells_of(trials))


@pytest.mark.parametrize("kind", ["random recipes", "random records"])
def test_drawn_inputs_are_read_or_named(attacker: ProcessPoolExecutor, kind: str) -> None:
    trials = attacker.submit(attack, kind, 10).result()
    assert not [trial for trial in trials if trial.fate in FAILURES], summary(trials)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_round_notices_a_check_that_was_taken_out(attacker: ProcessPoolExecutor, planted: str) -> None:
    """It tries every kind of damage to every kind of file; random ones missed such faults in short rounds."""
    trials = attacker.submit(find, planted).result()
    assert [trial.fate for trial in trials] == ["silent", "silent"], "a single cell is not enough"


def test_a_round_tries_every_damage_to_every_file(attacker: ProcessPoolExecutor) -> None:
    cells = attacker.submit(cells_of_attacks).result()
    files = {row for target in TARGETS for row, _ in cells[target.attack]}
    assert {"__0_0.distcp", ".metadata", "manifest.json", "trainer.json", "train.bin", "train.idx", "train.bin.crc",
            "tokenizer/tokenizer.json", "config.json", "model.safetensors", "adapter_config.json"} <= files  # fmt: skip
    for target in TARGETS:
        wanted = {damage for damage in target.damages if damage in ALL}
        for file in {row for row, _ in cells[target.attack]}:
            tried = [damage for row, damage in cells[target.attack] if row == file]
            assert set(tried) == (wanted if file.endswith(".json") else wanted - JSON.keys()), (target.attack, file)
            assert len(tried) == len(set(tried))
    assert {damage for _, damage in cells["token cache"]} == BYTES.keys()


def test_every_path_of_the_server_is_attacked() -> None:
    routes = re.findall(r'Route\("([^"]+)", .*methods=\["POST"\]', inspect.getsource(meshwright.serve.http))
    assert len(routes) > 7
    assert set(routes) == ENDPOINTS.keys()


def cells_of_attacks() -> dict[str, list[tuple[str, str]]]:
    """The cells of every kind, in the attacking process."""
    return {target.attack: list(_attacks[0].tabular(target.attack).cells()) for target in TARGETS}


def test_the_table_shows_the_worst_of_each_cell_in_bold() -> None:
    cell = ("train.bin", "cut")
    trials = [Trial("token cache", "", "", fate, cell=cell) for fate in ("named", "silent", "named")]
    trials.append(Trial("token cache", "", "", "survived", cell=("train.idx", "hole")))
    assert tables(cells_of(trials)).splitlines() == [
        "| token cache | cut | hole |",
        "| --- | --- | --- |",
        "| train.bin | **silent, named** | - |",
        "| train.idx | - | survived |",
    ]
    assert summary(trials).splitlines()[-1] == "| all | 4 | 1 | 2 | 0 | 0 | 1 | 0 | 0 |"


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
