"""Writes src/meshwright/planner/data/published_errors.csv, the error of every published run that a plan's page compares
its plan with: run it after changing the planner."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.validate.judge import Judged, judge
from meshwright.validate.table import read_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "src" / "meshwright" / "planner" / "data" / "published_errors.csv"
TABLES = {"published_runs.csv": 1, "published_runs_fresh.csv": 0, "published_runs_2026.csv": 0}
"""Table -> whether constants were fitted to its rows."""
HEAD = "quantity,id,device,devices,billions,experts,fitted,ratio,inside"


def page() -> str:
    """The whole table."""
    lines = [HEAD]
    for name, fitted in TABLES.items():
        for row in judge(read_table(ROOT / "benchmarks" / name).runs):
            lines += _of(row, fitted)
    return "\n".join(lines) + "\n"


def _of(row: Judged, fitted: int) -> Iterator[str]:
    job, cluster = row.run.job, row.run.cluster
    device = re.split(r"[- ]", cluster.device)[0]
    size = f"{job.model.num_parameters / 1e9:.3g}"
    name = row.run.id.replace(",", " ")
    for quantity in ("step_time", "memory"):
        predicted, measured = row.pairs(quantity)
        if measured:
            inside = int(predicted.low <= measured <= predicted.high)
            experts = int(job.model.top_k > 0)
            about = f"{quantity},{name},{device},{cluster.devices},{size},{experts},{fitted}"
            yield f"{about},{predicted.value / measured:.3f},{inside}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
