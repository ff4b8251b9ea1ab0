"""The page of one run or many on top of each other, in a file, in a notebook, or in a browser."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from meshwright.pages.charts import charts_of
from meshwright.pages.runs import differences, find_runs, names_of, read_run
from meshwright.pages.shell import framed, header, page
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably

PARTS = ("run.css", "tools.js", "charts.js", "panels.js", "board.js")


def view_data(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """The data of the page of these runs."""
    runs = [read_run(run_dir, name) for run_dir, name in zip(run_dirs, names_of(run_dirs), strict=True)]
    return {
        "runs": runs,
        "charts": charts_of(runs),
        "differences": differences(runs),
        "live": False,
    }


def view_page(data: dict[str, Any]) -> str:
    """The page of `view_data`. Raises `UserError` if uPlot is not installed."""
    runs = data["runs"]
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    words = [escape(", ".join(filter(None, (run["strategy"], run["state"])))) for run in runs] if len(runs) == 1 else []
    words += [escape(runs[0]["folder"])] if len(runs) == 1 else []
    words += ['<span id="live" class="live">live</span>'] if data["live"] else []
    body = [
        header(title, " &middot; ".join(words)),
        '<main id="board"></main>',
        '<p class="foot">Drag in a chart to zoom all of them, double-click to see everything again. '
        "Made by meshwright view.</p>",
    ]
    return page(f"{title} - meshwright", body, data=data, parts=PARTS, plots=True)


class RunsPage:
    """The page of some runs. A notebook shows it below its cell."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Raises `UserError` if uPlot is not installed."""
        self.run_dirs = tuple(run_dirs)
        self.html = view_page(view_data(run_dirs))

    def save(self, path: Path | str) -> Path:
        """Write the page to a file, which needs no other file."""
        write_durably(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        return framed(self.html)

    def __repr__(self) -> str:
        return f"RunsPage({', '.join(map(str, self.run_dirs))})"


def view(*runs: Path | str) -> RunsPage:
    """The page of runs on top of each other; each argument is a run directory or a folder of runs.

    In a notebook, the last line of a cell shows it; `save` writes it to a file. Raises `UserError` if there is no run.
    """
    if not runs:
        raise UserError('view needs a run directory, as in view("runs/first")')
    return RunsPage(find_runs([Path(run) for run in runs]))
