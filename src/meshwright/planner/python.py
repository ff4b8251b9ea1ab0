"""The function `plan` of Python code, and its result, which a notebook shows as the plan's page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.pages.shell import framed
from meshwright.planner.page import plan_page
from meshwright.planner.query import TOP, Query, answer, as_json, find_recipe
from meshwright.predict.account import explain_field
from meshwright.predict.candidate import MARGIN
from meshwright.predict.recipe import planned_run
from meshwright.predict.text import cluster_lines, plan_lines
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import Overrides, listed
from meshwright.spec.run import Run
from meshwright.storage.durable import write_durably


class PlanResult:
    """The plan of a recipe, on one cluster or several. `print` shows the command line's text, a notebook the page."""

    def __init__(self, query: Query, recipe: Run, base_dir: Path) -> None:
        """Raises `UserError` for what cannot be planned."""
        self._planned = answer(query, recipe, base_dir)
        self.facts: dict[str, Any] = as_json(self._planned)
        """The plan as plain data, as `meshwright plan --json` prints it."""

    @property
    def layout(self) -> str | None:
        """The chosen layout in words; None if no layout fits."""
        chosen = self._only("layout").facts["chosen"]
        return chosen["text"] if chosen else None

    @property
    def run(self) -> Run:
        """The recipe with the chosen layout. Raises `UserError` if no layout fits."""
        only = self._only("run")
        run = planned_run(only.recipe, only.plan, only.cluster)
        return (
            run if only.recipe.file.path is None else run.read_from(only.recipe.file.path, only.recipe.file.overrides)
        )

    def explain(self, field: str) -> str:
        """A figure derived term by term: memory, time, mfu, cost or search."""
        return explain_field(self._only("explain").plan, field)

    def save(self, path: Path | str) -> Path:
        """Write the plan's page to a file, which needs no other file."""
        write_durably(Path(path), plan_page(self._planned))
        return Path(path)

    def _only(self, name: str) -> Any:
        if len(self._planned) > 1:
            raise UserError(f"{name} is for one cluster; plan for each cluster alone")
        return self._planned[0]

    def __str__(self) -> str:
        facts = [one.facts for one in self._planned]
        return "\n".join(plan_lines(facts[0]) if len(facts) == 1 else cluster_lines(facts))

    def __repr__(self) -> str:
        layouts = (one.facts["chosen"]["text"] if one.facts["chosen"] else "nothing fits" for one in self._planned)
        return f"PlanResult({', '.join(layouts)})"

    def _repr_html_(self) -> str:
        return framed(plan_page(self._planned))


def plan(
    recipe: Run | Path | str,
    overrides: Overrides = (),
    *,
    cluster: str | Sequence[str] = (),
    top: int = TOP,
    margin: float = MARGIN,
    consider: str = "",
    methods: bool = True,
) -> PlanResult:
    """Rank the layouts of a recipe by predicted memory, speed and cost, without training.

    `recipe` is a `Run`, a recipe's file (with `overrides` such as `training.steps=100`), or the name of a model.
    `cluster` is `8xh100`, `64xa100-80g@400Gb/s`, a file or `local`, by default the recipe's; several are compared. A
    layout that needs the share `margin` of the memory is called tight; `top` layouts are listed. `consider` names
    changes of the recipe that compete with it, as in `offload,fp8`. Without `methods`, full fine-tuning, LoRA and QLoRA
    are not compared.

    Raises `UserError` for what cannot be planned.
    """
    clusters = (cluster,) if isinstance(cluster, str) else tuple(cluster)
    what = "" if isinstance(recipe, Run) else str(recipe)
    query = Query(what, listed(overrides), clusters, top=top, margin=margin, consider=consider, methods=methods)
    query.check()
    if not isinstance(recipe, Run):
        return PlanResult(query, *find_recipe(what, query.words))
    if overrides:
        raise UserError("overrides are for a recipe's file; give them to load_recipe")
    return PlanResult(query, recipe, recipe.file.folder)
