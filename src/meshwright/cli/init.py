"""The verb `init`: lists the preset recipes, or prints one with its settings explained; prints the recipe's schema."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.cli.common import presets
from meshwright.cli.output import add_json_argument, print_result
from meshwright.families import PRESETS as MODELS
from meshwright.families import resolve_model
from meshwright.spec.base import Spec
from meshwright.spec.document import write_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields
from meshwright.spec.problems import did_you_mean
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run
from meshwright.spec.schema import SCHEMA, recipe_schema

WIDTH = 110
COMMENT_COLUMN = 36
"""Comments begin in this column; after a longer value, on the next line."""

FOR_EDITORS = f"# yaml-language-server: $schema={SCHEMA}"
"""The line by which an editor with a YAML language server completes and checks the recipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `init`."""
    parser.add_argument("preset", metavar="PRESET", nargs="?", help="preset to print (default: list all)")
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="override a setting of the printed recipe"
    )
    parser.add_argument("--full", action="store_true", help="with every setting, given or default")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n  meshwright init\n  meshwright init demo > run.yaml\n  meshwright init demo --full\n"
        "  meshwright init --schema > recipe.schema.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the presets, or print one, or the schema.

    Raises UserError for options that do not go together.
    """
    if arguments.schema and (arguments.preset or arguments.full or arguments.json):
        raise UserError("--schema describes every recipe and is JSON already; give it alone")
    if arguments.full and arguments.preset is None:
        raise UserError("--full needs a preset, as in meshwright init demo --full")
    if arguments.schema:
        print(json.dumps(recipe_schema(), indent=2))
        return 0
    if arguments.preset is None:
        titles = {name: _title(path) for name, path in presets().items()}
        print_result(arguments, titles, _listed(titles))
        return 0
    path = find_preset(arguments.preset)
    recipe = load_recipe(path, arguments.overrides)
    lines = [FOR_EDITORS, *(commented_recipe if arguments.full else short_recipe)(recipe, path)]
    print_result(arguments, recipe.model_dump(mode="json"), lines)
    return 0


def find_preset(name: str) -> Path:
    """The file of a preset recipe; raises UserError with the nearest name if it does not exist."""
    known = presets()
    if name in known:
        return known[name]
    if name in MODELS:
        raise UserError(
            f"'{name}' is a model, not a preset; use it in any recipe, as in meshwright init gpt2-124m model={name}"
        )
    hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
    raise UserError(f"unknown preset '{name}'{hint}")


def short_recipe(recipe: Run, preset: Path) -> Iterator[str]:
    """The settings that a preset's recipe gives, as lines of YAML, each with the first sentence of its meaning.

    Raises UserError if the model does not exist.
    """
    resolve_model(recipe.model, base_dir=Path(), vocab=recipe.data.tokenizer_vocab)
    yield f"# {_title(preset)}"
    yield f"# Every other setting has its default; `meshwright init {preset.stem} --full` explains all of them."
    yield from _given(recipe, "")


def _given(section: Spec, indent: str) -> Iterator[str]:
    """The lines of the settings that a section gives."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in section.model_fields_set:
            continue
        meaning = _meaning(field).split(". ")[0].rstrip(".") + "."
        if isinstance(value, Spec):
            yield f"{indent}{name}:"
            yield from _given(value, indent + "  ")
        elif isinstance(value, tuple) and value and isinstance(value[0], Spec):
            yield from _beside(f"{indent}{name}:", meaning)
            for item in value:
                first, *others = _given(item, indent + "    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from others
        else:
            yield from _beside(indent + _entry(name, value), meaning)


def commented_recipe(recipe: Run, preset: Path) -> Iterator[str]:
    """A preset's recipe as lines of YAML with every setting, given or default, and its meaning in a comment.

    Sizes of the model that follow from its name or family are commented out, with their values.

    Raises UserError if the model does not exist.
    """
    model = resolve_model(recipe.model, base_dir=Path(), vocab=recipe.data.tokenizer_vocab)
    sizes = {
        name: value.model_dump(exclude_defaults=True) if isinstance(value, Spec) else value for name, value in model
    }
    yield f"# {_title(preset)}"
    for name, field in Run.model_fields.items():
        value = getattr(recipe, name)
        yield ""
        yield from textwrap.wrap(f"# {_meaning(field)}", WIDTH, subsequent_indent="# ")
        if isinstance(value, Spec):
            yield f"{name}:"
            yield from _section(value, "  ", sizes if isinstance(value, ModelFields) else {})
        else:
            yield _entry(name, value)


def _listed(titles: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, titles))
    yield from (f"{name:<{width}}  {title}" for name, title in titles.items())
    yield "\nmeshwright init PRESET > run.yaml   saves one; --full also prints every default"
    yield textwrap.fill(f"Models that a recipe can name: {', '.join(MODELS)}", WIDTH)


def _title(path: Path) -> str:
    """The preset's description: the comment on its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def _section(section: Spec, indent: str, inherited: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one section; `inherited` has the values of settings that are not given."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Spec):
            yield from _beside(f"{indent}{name}:", _meaning(field))
            yield from _section(value, indent + "  ", {})
        elif isinstance(value, tuple) and value and isinstance(value[0], Spec):
            yield from _beside(f"{indent}{name}:", _meaning(field))
            for item in value:
                first, *others = _section(item, indent + "    ", {})
                yield f"{indent}  - {first.lstrip()}"
                yield from others
        elif value is None and field.default is None:
            entry = f"{name}:" if inherited.get(name) is None else _entry(name, inherited[name])
            yield from _beside(f"{indent}# {entry}", _meaning(field))
        else:
            yield from _beside(indent + _entry(name, value), _meaning(field))


def _entry(name: str, value: Any) -> str:
    """One line of YAML, lists and mappings in brackets."""
    value = list(value) if isinstance(value, tuple) else value
    return f"{name}: {write_yaml([value]).strip()[1:-1]}"


def _meaning(field: FieldInfo) -> str:
    """A field's description, and its choices if the description does not name them."""
    meaning = " ".join((field.description or "").split())
    choices = [str(choice) for choice in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    if len(choices) > 1 and not all(choice in meaning for choice in choices):
        meaning += f" One of {', '.join(choices)}."
    return meaning


def _beside(entry: str, comment: str) -> Iterator[str]:
    """An entry with its comment on the right, continued on the next lines."""
    first, *others = textwrap.wrap(f"# {comment}", WIDTH - COMMENT_COLUMN, subsequent_indent="# ")
    if len(entry) + 2 <= COMMENT_COLUMN:
        yield f"{entry:<{COMMENT_COLUMN}}{first}"
    else:
        indent = entry[: len(entry) - len(entry.lstrip(" #"))]
        yield from textwrap.wrap(entry, WIDTH, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
        others = [first, *others]
    for line in others:
        yield " " * COMMENT_COLUMN + line
