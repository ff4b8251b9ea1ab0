"""The one place that says how a recipe is named on the command line, and where the preset recipes lie."""

import argparse
from pathlib import Path

from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""Folder of the preset recipes."""


def presets() -> dict[str, Path]:
    """Every preset recipe by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The operands `RECIPE [a.b=c ...]`."""
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="recipe file (YAML)")
    parser.add_argument(
        "overrides",
        metavar="a.b=c",
        nargs="*",
        help="change one setting of the recipe, as in training.steps=100 or layout={dp_shard: 2}",
    )


def read_recipe(arguments: argparse.Namespace) -> Run:
    """The recipe that the command line names, its overrides applied.

    Raises ValueError for everything that is wrong with it, and where it is a preset's name instead of a file.
    """
    path: Path = arguments.recipe
    if not path.exists() and str(path) in presets():
        raise ValueError(
            f"'{path}' is a preset, not a file; write it down first: meshwright init {path} > {path}.yaml"
        )
    return load_recipe(path, arguments.overrides)
