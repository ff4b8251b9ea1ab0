"""The verb `diff`: what differs between two runs, checkpoints or recipes: settings, versions, data, code, machine."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.output import add_json_argument, print_result
from meshwright.cli.runs import flow_text
from meshwright.pages.runs import ENVIRONMENT, RESOLVED, flat, read_json, read_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe

TRAINER = "trainer.json"
"""File of a checkpoint."""
WIDE = 80
SECTIONS = ("recipe", "code", "versions", "data", "machine")
MACHINE = ("device", "platform", "threads", "world_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `diff`."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), type=Path, help="run directory, checkpoint or recipe")
    parser.add_argument("--all", action="store_true", help="also settings of folders and names, such as run_dir")
    add_json_argument(parser)
    parser.epilog = (
        "exit status: 0 nothing differs, 1 something does, 2 an error\n\nexamples:\n  meshwright diff runs/a runs/b\n"
        "  meshwright diff runs/a/checkpoints/step-00000400 run.yaml"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every difference; returns 1 if there is one."""
    pair = describe(arguments.a), describe(arguments.b)
    differences = {section: _differing(pair[0].get(section), pair[1].get(section)) for section in SECTIONS}
    if not arguments.all:
        for name in ("run_dir", "data.cache_dir"):
            differences["recipe"].pop(name, None)
    unknown = [name for name in SECTIONS if None in (pair[0].get(name), pair[1].get(name))]
    print_result(arguments, {"differences": differences, "unknown": unknown}, _lines(differences, unknown))
    return 1 if any(differences.values()) else 0


def describe(path: Path) -> dict[str, Any]:
    """The facts of a run, a checkpoint or a recipe by section; what is not known is left out.

    Raises `UserError` if `path` is none of them.
    """
    if path.is_file():
        return {"recipe": flat(load_recipe(path, []).model_dump(mode="json"))}
    if not (path / RESOLVED).is_file():
        what = (
            "neither a run directory nor a checkpoint (it has no resolved.yaml)"
            if path.is_dir()
            else "no such run, checkpoint or recipe"
        )
        raise UserError(f"{path}: {what}")
    environment = read_json(path / ENVIRONMENT)
    origin = environment.get("origin") or read_json(path / TRAINER).get("origin") or {}
    facts: dict[str, Any] = {"recipe": flat(read_yaml(path / RESOLVED).get("run") or {})}
    if origin:
        facts["code"] = {"meshwright": origin.get("meshwright"), "commit": origin.get("commit")}
        facts["versions"] = {"python": origin.get("python"), **(origin.get("packages") or {})}
        facts["data"] = origin.get("data") or {}
    if environment:
        facts["machine"] = {name: environment.get(name) for name in MACHINE}
    return facts


def _differing(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """Name -> both values, where they differ; nothing if one side is not known."""
    if a is None or b is None:
        return {}
    names = dict.fromkeys((*a, *b))
    return {name: (a.get(name), b.get(name)) for name in names if _plain(a.get(name)) != _plain(b.get(name))}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _lines(differences: dict[str, dict[str, tuple[Any, Any]]], unknown: list[str]) -> Iterator[str]:
    for section, differing in differences.items():
        if differing:
            yield section
        for name, (a, b) in differing.items():
            line = f"  {name}: {flow_text(a)} -> {flow_text(b)}"
            if len(line) <= WIDE:
                yield line
            else:
                yield from (f"  {name}:", f"    {flow_text(a)}", f"    {flow_text(b)}")
    same = [name for name in SECTIONS if not differences[name] and name not in unknown]
    if same:
        yield f"equal: {', '.join(same)}"
    if unknown:
        yield f"not known of both: {', '.join(unknown)}"
