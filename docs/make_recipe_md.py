"""Writes docs/recipe.md from the fields of `meshwright.spec`: run it after changing one."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.spec.base import Spec
from meshwright.spec.document import write_yaml
from meshwright.spec.run import Run

PAGE = Path(__file__).with_name("recipe.md")

BEGIN = """\
# The recipe

A recipe is a YAML file that describes a training run: model, data, training, layout. `meshwright init` lists presets,
`meshwright init PRESET > run.yaml` saves one with its settings explained, `meshwright check run.yaml` reports its
errors, and `meshwright train run.yaml` trains it.

- **Only settings that differ from the defaults below are needed**; the shortest recipe is `model: gpt2`.
- **Data, not code.** Numbers, words and paths. Tags, anchors and merge keys are refused; duplicate keys are an error.
- **Scalars as in YAML 1.2**: `1e-4` is a number, `on`, `no` and `yes` are text, true and false are written `true` and
  `false`. Text that begins with `*` needs quotes: `"*.txt"`. A quoted number is text.
- **All errors are reported at once**, each in one line with its file, its line and what would work.
- **The command line overrides settings** with `a.b=c`: `meshwright train run.yaml training.steps=500
  model.num_layers=4 'layout={dp_shard: 4}' data.sources.0.path=other.txt`. Nothing else does: there are no environment
  variables and no other configuration files.
- `model: NAME` is short for `model: {name: NAME}`, and a source that is text is short for `{path: TEXT}`.

In Python the same settings are arguments: `Run(model="gpt2", training={"steps": 500})`.
"""


def page() -> str:
    """The text of docs/recipe.md."""
    return "\n".join([BEGIN, *_section(Run, "Top level", "")])


def _section(spec: type[Spec], title: str, path: str) -> Iterator[str]:
    yield f"## {title}\n"
    if path:
        yield _one_line(spec.__doc__) + "\n"
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    inner: list[tuple[str, list[type[Spec]]]] = []
    for name, field in spec.model_fields.items():
        found = list(_specs_in(field.annotation))
        if found:
            inner.append((f"{path}{name}", found))
        yield f"| `{path}{name}` | {_default(field)} | {_meaning(field)} |"
    yield ""
    for name, alternatives in inner:
        for found in alternatives:
            yield from _section(found, f"`{name}`{_choice(found) if len(alternatives) > 1 else ''}", f"{name}.")


def _choice(spec: type[Spec]) -> str:
    """What says that a section of alternatives is this one: its first field."""
    name, field = next(iter(spec.model_fields.items()))
    return f" with `{name}: {get_args(field.annotation)[0]}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, tuple):
        value = [item.model_dump() if isinstance(item, Spec) else item for item in value]
    elif value is None or isinstance(value, Spec):
        return ""
    return f"`{write_yaml([value]).strip()[1:-1]}`"


def _meaning(field: FieldInfo) -> str:
    meaning = _one_line(field.description)
    if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in get_args(field.annotation)) + "."
    return meaning.replace("|", "\\|")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _specs_in(annotation: Any) -> Iterator[type[Spec]]:
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for argument in get_args(annotation):
        yield from _specs_in(argument)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
