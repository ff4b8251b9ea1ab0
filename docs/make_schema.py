"""Writes the recipe's JSON schema, which the package ships for editors."""

import argparse
import json

from meshwright.spec.schema import SCHEMA, recipe_schema

LISTS = ("properties", "$defs")
"""The parts of the schema that are written entry by entry."""


def text() -> str:
    """The schema with one line for each setting of a recipe and for each section."""
    schema = recipe_schema()
    parts = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in schema.items() if name not in LISTS]
    for name in LISTS:
        entries = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in schema[name].items())
        parts.append(f'"{name}": {{\n' + ",\n".join(entries) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the file."""
    SCHEMA.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
