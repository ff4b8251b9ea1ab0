"""Completion in a shell, by argcomplete: verbs, options, presets, models, settings and their values."""

import argparse
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.cli.parser import VERBS

SECTIONS = ("anyOf", "oneOf")
"""The schema's words for alternatives."""


def complete() -> None:
    """Answer a shell that completes a command line, and end; return at once if none does, or without argcomplete."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    parser = argparse.ArgumentParser(prog="meshwright")
    verbs = parser.add_subparsers(dest="verb")
    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    for verb, about in VERBS.items():
        words = verbs.add_parser(verb, help=about)
        if [verb] == typed:  # the other verbs' options are not needed
            importlib.import_module(f"meshwright.cli.{verb}").add_arguments(words)
    argcomplete.autocomplete(parser, default_completer=_words_for)  # pyright: ignore[reportArgumentType]


def _words_for(prefix: str, action: argparse.Action, **_: Any) -> Iterable[str]:
    """The words that an operand or an option's value may be."""
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    from meshwright.cli.common import presets
    from meshwright.families import PRESETS
    from meshwright.predict.hardware import hardware_table

    match action.metavar:
        case "a.b=c" | "a.b=c,d,e":
            return settings(prefix)
        case "PRESET":
            return presets()
        case "NAME" if action.dest == "model":
            return PRESETS
        case "RECIPE":
            return [*FilesCompleter(("yaml", "yml"))(prefix), *(name for name in PRESETS if name.startswith(prefix))]
        case "DIR" | "FOLDER" | "RUN" | "CHECKPOINT" | "MODEL":
            return DirectoriesCompleter()(prefix)
        case _ if action.dest == "cluster":
            devices = {row["name"].split("-")[0].split(" ")[0].lower() for row in hardware_table()}
            return ["local", *(f"8x{device}" for device in sorted(devices))]
        case _:
            return FilesCompleter()(prefix)


def settings(prefix: str) -> Iterator[str]:
    """The settings of a recipe that begin with a prefix, each as `a.b=`; after an equals sign, `a.b=VALUE` for each of
    its choices."""
    from meshwright.spec.schema import recipe_schema

    schema = recipe_schema()
    for path, part in _leaves(schema, schema, ""):
        if "=" not in prefix:
            yield from [f"{path}="] if path.startswith(prefix) else []
        elif path == prefix.partition("=")[0]:
            yield from (f"{path}={value}" for value in dict.fromkeys(_choices(part, schema)))


def _leaves(part: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted path, its schema) of every setting that has no settings of its own, or a short form as well."""
    parts = list(_alternatives(part, schema))
    inner = [(name, value) for one in parts for name, value in one.get("properties", {}).items()]
    if path and (not inner or any("properties" not in one for one in parts)):
        yield path, part
    for name, value in dict(inner).items():
        yield from _leaves(value, schema, f"{path}.{name}" if path else name)


def _alternatives(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of the schema that a value may follow, with references resolved."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    listed = [one for word in SECTIONS for one in part.get(word, ())]
    if not listed:
        yield part
    for one in listed:
        yield from _alternatives(one, schema)


def _choices(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    for one in _alternatives(part, schema):
        if one.get("type") == "boolean":
            yield from ("true", "false")
        yield from map(str, one.get("enum", [one["const"]] if "const" in one else []))
