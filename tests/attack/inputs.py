"""Random recipes and random data, drawn by Hypothesis, which shrinks failures."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import yaml
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from attack.damage import ABSURD
from attack.good import RECIPE, Good
from attack.trial import FAILURES, Trial, copy, judge, run
from meshwright.spec.run import Run

SCHEMA = Run.model_json_schema()
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.sampled_from(ABSURD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
"""Any JSON value."""


def fitting(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a setting's schema allows, bounds included."""
    if "$ref" in schema:
        return fitting(SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*map(fitting, choices))
    low, high = (
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
    )
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high) | st.integers(low or 0, (low or 0) + 8 if high is None else high)
        case "number":
            return st.floats(low, high, allow_nan=False)
        case "string":
            return WORDS
        case "array":
            items = schema.get("items") or {}
            return st.lists(fitting(items), min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
        case "object" if "properties" in schema:
            return st.fixed_dictionaries(
                {}, optional={name: fitting(one) for name, one in schema["properties"].items()}
            )
        case _:
            return NESTED


def settings(
    schema: dict[str, Any] = SCHEMA, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, schema) of every setting of a recipe, sections included."""
    for name, one in schema["properties"].items():
        path = (*above, name)
        yield path, one
        for inner in (one, *one.get("anyOf", ()), *one.get("oneOf", ())):
            if "$ref" in inner and (section := SCHEMA["$defs"][inner["$ref"].rsplit("/", 1)[1]]).get("properties"):
                yield from settings(section, path)


SETTINGS = tuple(settings())


@st.composite
def recipes(draw: st.DrawFn) -> str:
    """The good recipe with one to four settings changed; three of four changes are within the schema."""
    recipe = json.loads(json.dumps(RECIPE))
    for path, schema in draw(st.lists(st.sampled_from(SETTINGS), min_size=1, max_size=4)):
        value = draw(fitting(schema) if draw(st.integers(0, 3)) else NESTED)
        section = recipe
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


ODD = st.one_of(WORDS, WORDS, WORDS, NESTED)
"""Mostly text."""
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "user", "assistant", "tool")), "content": ODD},
    optional={"tool_calls": NESTED, "name": NESTED, "weight": NESTED, "train": NESTED},
)
SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TURNS = st.one_of(st.just(list(SAID)), st.lists(TURN, max_size=4).map(lambda turns: [*SAID, *turns]), NESTED)
FORMATS = (
    st.fixed_dictionaries({"text": ODD}, optional={"weight": NESTED}),
    st.fixed_dictionaries({"prompt": ODD, "completion": ODD}),
    st.fixed_dictionaries({"instruction": ODD, "output": ODD}, optional={"input": ODD}),
    st.fixed_dictionaries({"messages": TURNS}, optional={"tools": NESTED, "label": NESTED}),
    st.fixed_dictionaries({"conversations": TURNS}),
    NESTED,
)
"""A line of a .jsonl file in each format, roughly."""


@st.composite
def data_files(draw: st.DrawFn) -> bytes:
    """Records of one format, rarely also of another, and rarely bytes that are not JSON."""
    records = draw(st.sampled_from(FORMATS))
    lines = [json.dumps(record).encode() for record in draw(st.lists(records, min_size=1, max_size=4))]
    if draw(st.integers(0, 7)) == 0:
        lines.append(json.dumps(draw(st.one_of(*FORMATS))).encode())
    if draw(st.integers(0, 7)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), draw(st.binary(max_size=40)))
    return b"\n".join(lines) + draw(st.sampled_from((b"\n", b"")))


def recipe_trial(good: Good, folder: Path, text: str, seed: str) -> Trial:
    """`check` of one recipe."""
    attacked = copy(good.folder, folder / "attacked")
    (attacked / "recipe.yaml").write_text(text)
    ended = run(("check", "recipe.yaml"), attacked)
    fate, said = judge(
        ended, same=True, names=("recipe.yaml:", "recipe.yaml: ", *(f"{name}." for name in Run.model_fields))
    )
    return Trial("random recipes", seed, repr(text), fate, said)


def data_trial(good: Good, folder: Path, data: bytes, seed: str) -> Trial:
    """`data prepare` of one file of records."""
    attacked = copy(good.folder, folder / "attacked")
    (attacked / "drawn.jsonl").write_bytes(data)
    read = {"sources": ["drawn.jsonl"], "sequence_length": 16, "tokenizer": "hf", "cache_dir": "drawn", "held_out": 0}
    recipe = {**RECIPE, "data": read | {"chat": {"template": "chatml"}}}
    (attacked / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ended = run(("data", "prepare", "recipe.yaml", "--processes", "1"), attacked)
    fate, said = judge(ended, same=True, names=("drawn.jsonl", "recipe.yaml"))
    return Trial("random records", seed, repr(data), fate, said)


def drawn_trials(
    strategy: st.SearchStrategy[Any], trial: Callable[[Any, str], Trial], count: int, seed: int, deadline: float
) -> list[Trial]:
    """`count` trials of drawn inputs; the first failure ends them, shrunk to the smallest input that fails the same
    way."""
    trials: list[Trial] = []
    failed: list[Trial] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def each(value: Any) -> None:
        if time.monotonic() > deadline and not failed:
            return
        found = trial(value, f"seed {seed}, number {len(trials)}")
        (failed if found.fate in FAILURES else trials).append(found)
        assert found.fate not in FAILURES, found.fate

    try:
        each()
    except AssertionError:
        trials.append(failed[-1])
    return trials
