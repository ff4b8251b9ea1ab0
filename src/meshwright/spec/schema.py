"""The JSON schema of a recipe, for editors (yaml-language-server) and other programs that write recipes."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.spec.run import Run

SCHEMA = Path(__file__).with_name("recipe.schema.json")
"""The schema as a file, which the first line of a printed recipe names (docs/make_schema.py writes it)."""
SHORT_FORMS: dict[tuple[str, ...], dict[str, Any]] = {
    ("properties", "model"): {"type": "string", "description": "A published name, a directory or a hub's id."},
    ("properties", "layout"): {"const": "auto"},
    ("properties", "callbacks", "items"): {"type": "string"},
    ("$defs", "DataSpec", "properties", "sources", "items"): {"type": "string"},
    ("$defs", "DataSpec", "properties", "sources"): {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/SourceSpec"}]},
    ("$defs", "EvaluationSpec", "properties", "tasks", "items"): {"type": "string"},
    ("$defs", "TrainingSpec", "properties", "objective"): {"type": "string"},
}
"""Place in the schema -> the shorter form that a recipe may have there, which validators expand."""


@functools.cache
def recipe_schema() -> Mapping[str, Any]:
    """The schema (JSON Schema 2020-12) of everything that a recipe may contain; rules between settings are checked by
    `meshwright check` alone."""
    schema = Run.model_json_schema()
    for place, short in SHORT_FORMS.items():
        *around, last = place
        parent = schema
        for part in around:
            parent = parent[part]
        whole = parent[last]
        kept = {key: whole.pop(key) for key in ("default", "description", "title") if key in whole}
        parent[last] = {**kept, "anyOf": [whole, short]}
    for section in _sections(schema):
        section.pop("default", None)  # a section's settings have their own
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A Meshwright recipe"}


def _sections(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of the schema whose default is a whole section or a list of sections."""
    if isinstance(schema, dict):
        if isinstance(schema.get("default"), dict):
            yield schema
        for part in schema.values():
            yield from _sections(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _sections(part)
