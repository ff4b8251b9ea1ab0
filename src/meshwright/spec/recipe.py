"""Recipes: a file and `a.b=c` overrides become a Run, and a Run becomes a file."""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from meshwright.spec.base import Spec
from meshwright.spec.document import KeyPath, Origin, YamlDocument, read_yaml, scalar, write_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.problems import RecipeError, explain, is_setting
from meshwright.spec.run import RecipeFile, Run

SpecT = TypeVar("SpecT", bound=Spec)


Overrides = str | Sequence[str]
"""One override, as in `training.steps=100`, or several."""


def load_recipe(path: str | Path, overrides: Overrides = ()) -> Run:
    """Read the recipe at `path` and apply the overrides (`training.steps=100`) in order. The run knows its file.

    Raises RecipeError with every problem at once, and OSError if the file cannot be read.
    """
    several = listed(overrides)
    return load_spec(path, Run, several).read_from(Path(path), several)


def listed(overrides: Overrides) -> tuple[str, ...]:
    """The overrides, also of one given as text."""
    return (overrides,) if isinstance(overrides, str) else tuple(overrides)


def load_spec(path: str | Path, spec: type[SpecT], overrides: Sequence[str] = ()) -> SpecT:
    """Read any object of `spec/` that was saved with `dump_recipe`, such as `resolved.yaml`, and apply the
    overrides."""
    return parse_spec(_read_text(path), spec, overrides, source=str(path))


def line_of(path: str | Path, setting: str) -> str | None:
    """The line of the recipe at `path` that sets `training.steps`, as `run.yaml:12`; None if none does."""
    document = _read_document(_read_text(path), source=str(path))
    place = document.places.get(tuple(int(part) if part.isdecimal() else part for part in setting.split(".")))
    return place.text if place else None


def with_place(message: str, file: RecipeFile) -> str:
    """The message, prefixed by `run.yaml:12: ` if it begins with a setting or section on line 12 of the recipe."""
    match = re.match(r"\w+(\.\w+)*", message)
    setting = match[0] if match else ""
    # File names at the start of a message have dots too: model.safetensors, or a recipe named data.yaml.
    if not is_setting(setting, Run) or any(override.startswith(setting) for override in file.overrides):
        return message
    if file.path is None or not file.path.is_file():
        return message
    path = setting.split(".")
    places = (line_of(file.path, ".".join(path[:length])) for length in range(len(path), 0, -1))
    place = next(filter(None, places), None)
    return f"{place}: {message}" if place else message


def parse_spec(text: str, spec: type[SpecT], overrides: Sequence[str] = (), *, source: str = "recipe") -> SpecT:
    """Parse an object of `spec/` from YAML text and apply the overrides; `source` names the text in problems."""
    document = _read_document(text, source=source)
    if not document.problems and not isinstance(document.value, dict):
        what = "empty" if document.value is None else "not a recipe"
        document.refuse((), f"{what}; a recipe is lines of 'key: value', 'model: NAME' at the least")
    if not isinstance(document.value, dict):
        raise _error(document)
    for index, override in enumerate(overrides):
        _override(document, override, order=2**40 + index)
    result, wrong = None, []
    try:
        # Strict, so nothing is guessed: "5" is not a number, yes is not a boolean. Parsed as JSON, because strict mode
        # then still turns mappings into sections and lists into tuples.
        written = {"written": spec is not Run}  # written by a run; other verbs do not need its plug-ins
        if written["written"]:
            renew(document.value)
        result = spec.model_validate_json(json.dumps(document.value), strict=True, context=written)
    except ValidationError as error:
        for path, message in explain(error, spec, document.value):
            document.refuse(path, message)
            wrong.append(path)
        result = _without(document.value, wrong, spec)
    if result is None or document.problems:
        raise _error(document, result, (str(path[0]) for path in wrong if path))
    return result


def dump_recipe(run: Spec, *, expanded: bool = False) -> str:
    """The run as YAML text that loads back to an equal run, with only the given settings or with every default."""
    value = run.model_dump(mode="json", exclude_unset=not expanded)
    if isinstance(run, Run) and set(value["model"]) == {"name"}:
        value["model"] = value["model"]["name"]
    return write_yaml(value)


def renew(saved: dict[str, Any]) -> None:
    """Complete what an older version saved: the activation of a model told whether it was gated, and the recipe as
    given was called `asked`."""
    if "asked" in saved:
        saved["given"] = saved.pop("asked")
    model = saved.get("model")
    if isinstance(model, dict) and "activation" in model and "gated" not in model:
        model["gated"] = model["activation"] == "swiglu"
        if model["gated"]:
            model["activation"] = "silu"


def _read_text(path: str | Path) -> str:
    try:
        return regular(Path(path)).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{path}:{line}: not UTF-8 text"]) from error


def _read_document(text: str, *, source: str) -> YamlDocument:
    return read_yaml(text, lambda line: Origin(line, f"{source}:{line}"))


def _error(document: YamlDocument, rest: Spec | None = None, wrong: Iterable[str] = ()) -> RecipeError:
    return RecipeError([problem.message for problem in sorted(document.problems)], rest, wrong)


def _without(value: dict[str, Any], paths: Iterable[KeyPath], spec: type[SpecT]) -> SpecT | None:
    """The spec of `value` without the entries at `paths`, which may be whole lists; None if the rest is invalid too."""
    rest = json.loads(json.dumps(value))
    for path in paths:
        *around, last = takewhile(lambda part: isinstance(part, str), path) if path else ("",)
        section = functools.reduce(lambda section, key: section.get(key, {}), around, rest)
        section.pop(last, None)
    try:
        return spec.model_validate_json(json.dumps(rest), strict=True)
    except ValidationError:
        return None


def _override(document: YamlDocument, override: str, *, order: int) -> None:
    """Set `a.b=c` in the document; missing sections on the path are created."""
    target, equals, text = (part.strip() for part in override.partition("="))
    keys = target.split(".")
    place = Origin(order, f"command line: {override}", names=target)
    if not equals or "" in keys:
        document.refuse((), "an override is written key=value, for example training.steps=100", place)
        return
    given = _override_value(text, place)
    document.problems += given.problems
    if given.problems:
        return
    container: Any = document.value
    path: KeyPath = ()
    if len(keys) > 1 and isinstance(container.get("model"), str) and keys[0] == "model":
        container["model"] = {"name": container["model"]}  # `model: NAME` is the short form of this
    for depth, key in enumerate(keys, 1):
        try:
            part = _part(container, key)
        except ValueError as error:
            document.refuse(path, str(error), place)
            return
        path = (*path, part)
        if depth == len(keys):
            container[part] = given.value
        elif isinstance(container, dict) and container.get(part) in (None, "none"):  # `offload: none` is no section yet
            if keys[depth].isdecimal():
                document.refuse(path, "the recipe has no list here; set the whole list, as in a.b=[x, y]", place)
                return
            container[part] = {}
            document.places[path] = place
        container = container[part]
    around = {known: where for known, where in document.places.items() if known[: len(path)] != path}
    document.places = around | {(*path, *inner): place for inner in given.places}


def _part(container: Any, key: str) -> str | int:
    """`key` as the key of a section, or as the index in a list."""
    if isinstance(container, list):
        if key.isdecimal() and int(key) < len(container):
            return int(key)
        raise UserError(f"the recipe's list has {len(container)} items, counted from 0")
    if isinstance(container, dict):
        return key
    raise UserError(f"it is {container!r}, not a section, so it has no setting {key}")


def _override_value(text: str, place: Origin) -> YamlDocument:
    """The value of an override: a list, mapping or quoted text in YAML's flow style, else a scalar."""
    if text.startswith(("[", "{", "'", '"')):
        return read_yaml(text, lambda line: place)
    return YamlDocument(scalar(text), {(): place})
