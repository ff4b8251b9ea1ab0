"""The campaign of mutants (`make mutants`) fits the current source; its layouts are legal and drawn by a seed."""

import re

import pytest

from meshwright.spec.fit import find_misfits
from meshwright.testing.layouts import random_layouts
from mutants.cases import CASES
from mutants.layouts import legal
from mutants.one import build
from mutants.run import MUTANTS, SOURCE, key_of
from mutants.table import Mutant


def test_there_are_many_and_none_twice() -> None:
    assert len(MUTANTS) >= 60
    assert len({key_of(mutant) for mutant in MUTANTS}) == len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
@pytest.mark.every(1)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    """If the source has changed, change the mutant with it."""
    text = (SOURCE / "meshwright" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    re.compile(mutant.names)


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_legal(case: str) -> None:
    run = build(case)
    assert not find_misfits(run.run.layout, run.model, run.run.data.sequence_length)


def test_random_layouts_are_legal_and_drawn_by_their_seed() -> None:
    drawn = list(random_layouts(seed=0, count=40, build=legal))
    assert {run.run.run.layout.world_size for run in drawn} <= set(range(2, 9))
    assert len({run.run.run.layout.strategy for run in drawn}) > 25
    assert [run.run for run in random_layouts(seed=17, count=2, build=legal)] == [run.run for run in drawn[17:19]]
