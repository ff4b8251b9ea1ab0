"""Writes docs/plan-questions.md, what practice does and what the planner says: a few minutes of one core."""

import argparse
import csv
import datetime
import re
from pathlib import Path
from typing import Any

from meshwright.planner.query import Query, answer, find_recipe
from meshwright.predict.report import Plan

PAGE = Path(__file__).with_name("plan-questions.md")
TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "plan_questions.csv"
BEGIN = """\
# Questions with known answers

{count} questions that practice has answered ([`plan_questions.csv`](../benchmarks/plan_questions.csv)), and what `plan`
says of each on {date}: tok/s are per device. A test checks each row's condition, for example that nothing fits,
or that tensor parallelism stays inside a node. Where the choice differs from practice, the last column says why.

| question | practice | plan | difference |
|---|---|---|---|
"""


def planned(row: dict[str, str]) -> Plan:
    """The plan for a row."""
    words = tuple(re.findall(r"\S+=\{[^}]*\}|\S+", row["settings"]))
    recipe, folder = find_recipe(row["model"], words)
    return answer(Query(row["model"], words, (row["cluster"],), methods=False), recipe, folder)[0].plan


def facts_of(plan: Plan) -> dict[str, Any]:
    """The names that a row's condition uses."""
    chosen = plan.chosen
    if chosen is None:
        return {"fits": False, "offload": False}
    layout = chosen.job.layout
    return {
        "fits": True,
        "offload": bool(layout.tiers.words) or chosen.change is not None,
        "dp": layout.data_parallel,
        "zero": layout.zero_stage,
        "mfu": chosen.mfu,
        "tokens": chosen.tokens_per_second,
    } | {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp_shard")}


def _line(row: dict[str, str]) -> str:
    chosen = planned(row).chosen
    text = "nothing fits"
    if chosen:
        layout, cost = chosen.job.layout, f"{chosen.tokens_per_second:,.0f} tok/s, {chosen.memory.total / 1e9:.0f} GB"
        degrees = [f"{name.upper()} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep")]
        split = ", ".join(degree for degree in degrees if not degree.endswith(" 1"))
        text = f"{chosen.strategy}{f' ({split})' if split else ''}: {cost}"
    return f"| {row['question']} | {row['practice']} | {text} | {row['note']} |\n"


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    begin = BEGIN.format(count=len(rows), date=f"{datetime.date.today():%d %B %Y}")
    PAGE.write_text(begin + "".join(map(_line, rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
