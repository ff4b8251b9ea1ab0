"""The list of runs in a folder: state, newest figures, and what sets their recipes apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.pages.runs import differences, find_runs, names_of, read_run, size_of

FOLDER = "runs"
DATA_ONLY = ("data.cache_dir",)
"""Settings that set no run apart."""


def runs(*folders: Path | str) -> list[dict[str, Any]]:
    """The runs in folders (by default `runs`), the one that began first at the front: state, newest figures, and the
    settings that set their recipes apart, as `meshwright runs --json` prints them.

    Raises `UserError` if there is none.
    """
    return list_runs([Path(folder) for folder in folders or (FOLDER,)])


def list_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs in folders as data, the one that began first at the front. Raises `UserError` if there is none."""
    run_dirs = find_runs(folders)
    listed = [_read(run_dir, name) for run_dir, name in zip(run_dirs, names_of(run_dirs), strict=True)]
    for name, values in differences(listed):
        if name not in DATA_ONLY:
            for one, value in zip(listed, values, strict=True):
                one["differences"][name] = value
    return [{key: value for key, value in one.items() if key != "settings"} for one in listed]


def _read(run_dir: Path, name: str) -> dict[str, Any]:
    """A run's row."""
    read = read_run(run_dir, name)
    steps, held_out = read["tables"].get("step", {}), read["tables"].get("evaluation", {})
    return {
        "name": name,
        "folder": str(run_dir),
        "state": read["state"],
        "step": _last(steps.get("step", ())),
        "steps": read["steps"],
        "loss": _last(steps.get("loss", ())),
        "held_out_loss": _last(held_out.get("loss", ())),
        "tokens_per_s": _last(steps.get("tokens_per_s", ())),
        "seconds": read["elapsed"],
        "bytes": size_of(run_dir),
        "updated": read["updated"],
        "origin": read["environment"].get("origin"),
        "differences": {},
        "settings": read["settings"],
    }


def _last(values: Sequence[Any]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)
