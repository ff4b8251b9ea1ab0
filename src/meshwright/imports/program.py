"""Another engine's program that Meshwright has written: its constants, and the recipe at its end."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.imports.opening import read_data
from meshwright.imports.reading import Reading, flat
from meshwright.spec.errors import UserError

MARK = "# The recipe of this program, which `meshwright import` reads:\n"
CONSTANTS = {
    "STEPS": "training.steps",
    "GLOBAL_BATCH": "training.global_batch",
    "MICRO_BATCH": "training.micro_batch",
    "LENGTH": "data.sequence_length",
    "LR": "training.optimizer.lr",
    "BETAS": "training.optimizer.betas",
    "EPS": "training.optimizer.eps",
    "WEIGHT_DECAY": "training.optimizer.weight_decay",
    "CLIP": "training.clip",
}
"""A program's constant -> its setting in a recipe."""


def as_comment(recipe: str) -> str:
    """The recipe as the last lines of a program."""
    return MARK + "".join(f"#   {line}\n" for line in recipe.splitlines())


def is_program(text: str) -> bool:
    """Whether Meshwright has written this program."""
    return MARK in text


def read_program(reading: Reading, text: str, path: Path) -> None:
    """Read the recipe in a program, and its constants, which may have been edited since."""
    program, _, comment = text.partition(MARK)
    lines = [line[4:] for line in comment.splitlines() if line.startswith("#   ")]
    recipe = read_data(Path(f"{path}.yaml"), "\n".join(lines))
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: contains no recipe after '{MARK.strip()}'")
    settings = flat({"model.name" if key == "model" and isinstance(value, str) else key: value
                     for key, value in recipe.items()})  # fmt: skip
    for name, value in _constants(program, path):
        setting = CONSTANTS[name]
        before = settings.get(setting)
        if before == value or (setting == "training.micro_batch" and setting not in settings):
            continue
        origin = f"{path.name}: {name}={value}"
        if setting in settings:
            reading.notes.append(f"{origin}: the program was edited; its recipe has {before}")
        reading.set(setting, value, origin)
    for setting, value in settings.items():
        if setting not in reading.settings:
            reading.set(setting, value, f"{path.name}: {setting}")


def _constants(program: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The constants that a program assigns, one by one or several in a line."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: cannot be read as Python: {error}") from error
    for node in body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id in CONSTANTS:
                yield name.id, _value(value, name.id, path)


def _value(node: ast.expr, name: str, path: Path) -> Any:
    """A number or a pair of them; `math.inf` means no clipping."""
    if isinstance(node, ast.Attribute) and node.attr == "inf":
        return None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError) as error:
        raise UserError(f"{path}:{node.lineno}: {name} is not a number") from error
    return list(value) if isinstance(value, tuple) else value
