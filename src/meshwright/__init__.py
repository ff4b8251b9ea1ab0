"""Meshwright trains and fine-tunes language models with any parallel strategy from one recipe.

From Python, in five lines::

    from meshwright import Run, train

    run = Run(model={"family": "llama", "hidden": 256, "num_layers": 4, "num_heads": 4}, layout={"dp_shard": 2})
    result = train(run)
    print(result.loss, result.held_out_loss, result.checkpoint)
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m meshwright` is looked for in the working directory first, and so would be all that it imports: a
    # `queue.py` that lies beside a recipe. It must not run, so the directory goes before anything else is imported.
    del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.callbacks import Callback, Tracker, Training
    from meshwright.models import Block, Model
    from meshwright.objectives import Objective, Sums
    from meshwright.pages.listing import runs
    from meshwright.pages.view import RunsPage, view
    from meshwright.planner.python import PlanResult, plan
    from meshwright.serve.python import evaluate, generate
    from meshwright.spec.errors import UserError
    from meshwright.spec.recipe import load_recipe
    from meshwright.spec.run import Run
    from meshwright.trainer.run import TrainResult, train

__all__ = [
    "Block",
    "Callback",
    "Model",
    "Objective",
    "PlanResult",
    "Run",
    "RunsPage",
    "Sums",
    "Tracker",
    "TrainResult",
    "Training",
    "UserError",
    "__version__",
    "evaluate",
    "generate",
    "load_recipe",
    "plan",
    "runs",
    "train",
    "view",
]

_HOMES = {
    "Callback": "meshwright.callbacks",
    "Block": "meshwright.models",
    "Model": "meshwright.models",
    "Objective": "meshwright.objectives",
    "Run": "meshwright.spec.run",
    "RunsPage": "meshwright.pages.view",
    "Sums": "meshwright.objectives",
    "Tracker": "meshwright.callbacks",
    "TrainResult": "meshwright.trainer.run",
    "Training": "meshwright.callbacks",
    "PlanResult": "meshwright.planner.python",
    "UserError": "meshwright.spec.errors",
    "evaluate": "meshwright.serve.python",
    "generate": "meshwright.serve.python",
    "load_recipe": "meshwright.spec.recipe",
    "plan": "meshwright.planner.python",
    "runs": "meshwright.pages.listing",
    "train": "meshwright.trainer.run",
    "view": "meshwright.pages.view",
}


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import meshwright` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    public = getattr(importlib.import_module(_HOMES[name]), name)
    if not isinstance(public, type):
        public = importlib.import_module("meshwright.cli.python").for_python(public)
    globals()[name] = public
    return public
