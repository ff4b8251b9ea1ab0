"""The one place that says how a recipe is named on the command line, and where the preset recipes lie."""

import argparse
from functools import partial
from pathlib import Path

from meshwright.spec.problems import did_you_mean, setting_called
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""Folder of the preset recipes."""


def presets() -> dict[str, Path]:
    """Every preset recipe by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The operands `RECIPE [a.b=c ...]`."""
    parser.set_defaults(setting_called=partial(setting_called, spec=Run))  # for who writes one as an option
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="recipe file (YAML)")
    parser.add_argument(
        "overrides",
        metavar="a.b=c",
        nargs="*",
        default=[],
        help="change one setting of the recipe, as in training.steps=100 or 'layout={dp_shard: 2}'",
    )


def positive(text: str) -> int:
    """A whole number above 0, for an option; raises what argparse reports with the option's name."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: must be a whole number, at least 1")
    return int(text)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The operand that names a trained model, and where and in what precision it computes."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="run directory, checkpoint or Hugging Face directory")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16", "fp64"],
        help="default: the run's precision; else bf16 on a GPU",
    )


def example_prompt(*, has_template: bool) -> str:
    """Words for `generate` that suit a model whose tokenizer has a chat template, or none."""
    return "--chat --prompt 'What is a tuple?'" if has_template else "--prompt 'Once upon a time'"


def read_recipe(arguments: argparse.Namespace) -> Run:
    """The recipe that the command line names, its overrides applied.

    Raises ValueError for everything that is wrong with it, and where it is a preset's name instead of a file.
    """
    path: Path = arguments.recipe
    if not path.exists() and str(path) in presets():
        raise ValueError(f"'{path}' is a preset, not a file; write it down first: meshwright init {path} > {path}.yaml")
    if not path.exists():
        there = [one.name for one in path.parent.glob("*.y*ml")]
        raise ValueError(f"{path}: no such file or directory{did_you_mean(path.name, there, likeness=0.75)}")
    return load_recipe(path, arguments.overrides)
