"""What the planner is asked, and its answer: the same for the command line, a browser tab and a server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.families import resolve_model
from meshwright.predict.candidate import MARGIN, Candidate
from meshwright.predict.changes import asked_changes
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.recipe import plan_recipe, planned_run
from meshwright.predict.report import Plan
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields
from meshwright.spec.recipe import dump_recipe, load_recipe, parse_spec
from meshwright.spec.run import Run

TOP = 8
"""Layouts that a plan lists by default."""


@dataclass(frozen=True)
class Query:
    """The words and options of `meshwright plan`."""

    what: str
    """A recipe file, or a model."""
    words: tuple[str, ...] = ()
    """Overrides, `a.b=c`."""
    clusters: tuple[str, ...] = ()
    """Empty: the recipe's."""
    top: int = TOP
    margin: float = MARGIN
    consider: str = ""
    methods: bool = True

    def check(self) -> None:
        """Raise `UserError` for an option that is out of its range."""
        if not 0 <= self.margin < 1:
            raise UserError(f"--margin {self.margin} is not allowed: must be at least 0 and below 1 (default {MARGIN})")
        if self.top < 1:
            raise UserError(f"--top {self.top} is not allowed: show at least 1 layout")


@dataclass(frozen=True)
class Planned:
    """One recipe planned for one cluster."""

    recipe: Run
    cluster: str | None
    """As it was asked for; None: the recipe's."""
    plan: Plan
    facts: dict[str, Any]
    """The plan as plain data."""

    def write(self, chosen: Candidate | None = None) -> str:
        """The recipe with the chosen layout, or another one of the plan. Raises `UserError` if nothing was chosen."""
        return dump_recipe(planned_run(self.recipe, self.plan, self.cluster, chosen=chosen))


def answer(query: Query, recipe: Run, base_dir: Path) -> list[Planned]:
    """The plan for each cluster of the query. Raises `UserError` for what cannot be planned."""
    clusters: Sequence[str | None] = query.clusters or (None,)
    limits = SearchLimits(margin=query.margin, methods=query.methods and len(clusters) == 1)
    consider = asked_changes(query.consider) if query.consider else ()
    planned = []
    for cluster in clusters:
        plan, facts = plan_recipe(
            recipe, base_dir=base_dir, cluster=cluster, top=query.top, limits=limits, consider=consider
        )
        planned.append(Planned(recipe, cluster, plan, facts))
    return planned


def as_json(planned: Sequence[Planned]) -> dict[str, Any]:
    """What `plan --json` prints."""
    return planned[0].facts if len(planned) == 1 else {"clusters": [one.facts for one in planned]}


def find_recipe(what: str, overrides: Sequence[str], folder: Path = Path()) -> tuple[Run, Path]:
    """A recipe file, or the recipe of nothing but a model, and the folder of its relative paths."""
    path = folder / what
    if path.is_file() or path.suffix in (".yaml", ".yml", ".json"):
        return load_recipe(path, overrides), path.parent
    try:
        resolve_model(ModelFields(name=what), base_dir=folder)
    except UserError as error:
        raise UserError(f"{what}: no recipe of this name, nor a model: {error}") from error
    return parse_spec(json.dumps({"model": {"name": what}}), Run, overrides, source=f"plan {what}"), folder
