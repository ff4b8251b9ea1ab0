"""Check of an imported recipe; its errors cite the files that the settings come from."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.recipe import RecipeError, parse_spec
from meshwright.spec.run import Run

SOURCE = "the imported recipe"
PLACE = re.compile(rf"{SOURCE}:\d+: (?:([a-z_][\w.]*): )?(.*)", flags=re.DOTALL)


def check_recipe(text: str, settings: Mapping[str, tuple[Any, str]], files: str) -> None:
    """Raise `UserError` with every error of an imported recipe, each with the origin of the setting."""
    try:
        parse_spec(text, Run, source=SOURCE)
    except RecipeError as error:
        raise UserError("\n".join(_cited(problem, settings, files) for problem in error.problems)) from error


def _cited(problem: str, settings: Mapping[str, tuple[Any, str]], files: str) -> str:
    found = PLACE.fullmatch(problem)
    if found is None:
        return problem
    setting, message = found[1] or "", found[2]
    origins = [origin for path, (_, origin) in settings.items() if _concerns(path, setting, message)]
    said = f"{setting}: {message}" if setting else message
    return f"{'; '.join(dict.fromkeys(origins)) or files}: {said}"


def _concerns(path: str, setting: str, message: str) -> bool:
    """Whether an error about a setting, or its section, is about the setting at `path`."""
    if f"{setting}.".startswith(f"{path}."):
        return True
    inside = path.removeprefix(f"{setting}.") if path.startswith(f"{setting}.") else ""
    return bool(inside) and re.search(rf"(?<![\w.]){re.escape(inside)}(?![\w.])", message) is not None
