"""What practice does and what the planner says, question by question (`benchmarks/plan_questions.csv`)."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
from write_plan_questions import TABLE, facts_of, planned

ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("row", ROWS, ids=[row["question"] for row in ROWS])
def test_the_planner_says_what_practice_does(row: dict[str, str]) -> None:
    assert eval(row["check"], {}, facts_of(planned(row)))


def test_the_table_asks_sixty_questions_of_many_kinds() -> None:
    assert len({row["question"] for row in ROWS}) == len(ROWS) >= 60
    assert all(row["practice"] for row in ROWS)
    assert sum(row["check"] == "not fits" for row in ROWS) >= 5
