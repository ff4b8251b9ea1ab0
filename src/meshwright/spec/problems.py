"""Conversion of pydantic's validation errors to sentences."""

import difflib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.spec.base import Spec
from meshwright.spec.document import KeyPath, dotted
from meshwright.spec.errors import UserError
from meshwright.spec.synonyms import SYNONYMS, plain

S = TypeVar("S", bound=Spec)

LIKENESS = 0.75
"""Least likeness of two words to suggest a choice of a setting: gpu and cpu have less."""


EXACT = 2**53
"""Below it, a float that is a whole number is the one that was meant."""
SECTION = frozenset(["model_type", "model_attributes_type", "dict_type"])
"""pydantic's error types for a missing section."""


class RecipeError(UserError):
    """All errors in a recipe: one line each, which begins with its place or its setting."""

    def __init__(self, problems: Sequence[str], rest: Spec | None = None, wrong: Iterable[str] = ()):
        super().__init__("\n".join(problems))
        self.problems = list(problems)
        """One line per problem: `run.yaml:12: training.optimzer: unknown key; did you mean 'optimizer'?`"""
        self.rest, self.wrong = rest, frozenset(wrong)
        """The recipe without its invalid parts, if the rest is valid, and the sections that are incomplete: further
        checks can then report other problems at once."""


def explain(error: ValidationError, spec: type[Spec], value: Any) -> list[tuple[KeyPath, str]]:
    """Every problem of `error`, raised when `value` (plain data) was validated as `spec`: (path, sentence).

    The alternatives of one setting (a number or `auto`) become one sentence. If one alternative matched further (only
    an item of a list is wrong), the errors of the others (it is not a word) are left out.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    alternatives: set[KeyPath] = set()
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and len(details["input"]) >= details.get("ctx", {})["min_length"]:
            continue  # pydantic counts only valid items; invalid ones are reported separately
        path, is_alternative = _path_in(value, details)
        by_path.setdefault(path, []).append(details)
        if is_alternative:
            alternatives.add(path)
    for path in alternatives:
        if any(len(other) > len(path) and other[: len(path)] == path for other in by_path):
            del by_path[path]
    return [(path, _sentence(path, group, spec)) for path, group in by_path.items()]


def read_foreign(spec: type[S], values: Mapping[str, Any], *, where: str, names: Mapping[str, str]) -> S:
    """The `spec` of values from another program's file; like a recipe's, they are not guessed. Raises `UserError` like
    `foreign_problems`."""
    with foreign_problems(spec, values, where=where, names=names):
        return spec.model_validate_json(json.dumps(values, default=repr), strict=True)


@contextmanager
def foreign_problems(
    spec: type[Spec], values: Mapping[str, Any], *, where: str, names: Mapping[str, str]
) -> Iterator[None]:
    """Add the file `where` to an error about its `values`. A `ValidationError` becomes a `UserError` with the first
    problem, under the field's name in that file (`names`: our field -> theirs)."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except ValidationError as error:
        path, sentence = explain(error, spec, values)[0]
        name = dotted((names.get(str(path[0]), path[0]), *path[1:])) if path else "it"
        raise UserError(f"{where}: {name}: {sentence}") from error


def did_you_mean(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """`; did you mean 'x'?` for the known word with the synonym `word`, else for the nearest one, else an empty string.

    `likeness` is difflib's ratio, from 0 (anything) to 1 (the same word).
    """
    near = _nearest(word, known, likeness)
    return f"; did you mean '{near}'?" if near else ""


def _nearest(word: str, known: Iterable[str], likeness: float) -> str | None:
    spelled = {plain(one): one for one in known}
    same = spelled.get(SYNONYMS.get(plain(word), plain(word)))
    return same or next(iter(difflib.get_close_matches(word, spelled.values(), n=1, cutoff=likeness)), None)


def setting_called(word: str, spec: type[Spec]) -> str | None:
    """The path `a.b` of the setting called `word` here or in other tools, in any section; None if there is none."""
    ours = SYNONYMS.get(plain(word), plain(word))
    return next((path for path in map(dotted, _all_paths(spec)) if f".{path}".endswith(f".{ours}")), None)


def is_setting(path: str, spec: type[Spec]) -> bool:
    """Whether `a.b` is a setting or a section of a spec."""
    return path in map(dotted, _all_paths(spec))


def _path_in(value: Any, details: ErrorDetails) -> tuple[KeyPath, bool]:
    """The error's path without pydantic's names of alternatives, and whether it ended in one of them."""
    path: KeyPath = ()
    is_alternative = False
    for part in details["loc"]:
        is_alternative = part not in _keys(value)
        if not is_alternative:
            path, value = (*path, part), value[part]
    if details["type"] == "missing" and isinstance(details["loc"][-1], str):
        return (*path, details["loc"][-1]), False
    return path, is_alternative


def _keys(value: Any) -> Container[str | int]:
    if isinstance(value, dict):
        return value.keys()
    return range(len(value)) if isinstance(value, list) else ()


def _sentence(path: KeyPath, group: list[ErrorDetails], spec: type[Spec]) -> str:
    first = group[0]
    value, kind = first["input"], first["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, spec)
    if kind == "missing":
        return "required, but not given" if path[-1] == first["loc"][-1] else f"{_shown(value)} has too few values"
    if kind == "value_error":
        return str(first.get("ctx", {})["error"])
    if kind.startswith("union_tag"):
        return _wrong_kind(path, first, spec)
    requirement = " or ".join(_requirement(details) for details in group)
    kinds = [details["type"] for details in group]
    hint = _hint(value, kinds)
    if isinstance(value, str) and not hint:
        choices = [choice for details in group for choice in _choices(details)]
        hint = did_you_mean(value, choices, likeness=LIKENESS)
        if not SECTION.isdisjoint(kinds):
            hint = _as_section(value, path, spec) or _elsewhere(value, spec)
        elif value.lower() in ("none", "off", "no", "never") and _may_be_null(path, spec):
            hint = "; write null"
    return f"{_shown(value)} is not allowed: must be {requirement}{hint}"


def _wrong_kind(path: KeyPath, details: ErrorDetails, spec: type[Spec]) -> str:
    """The error for a section of several kinds: the field that selects the kind is missing or invalid."""
    limits = details.get("ctx", {})
    field, tag = str(limits["discriminator"]).strip("'"), limits.get("tag")
    kinds = [kind for section in _sections_at(spec, path) for kind in get_args(section.model_fields[field].annotation)]
    known = ", ".join(dict.fromkeys(kinds))
    if tag is None:
        return f"{field} is required, but not given; there are {known}"
    return f"{field}: '{tag}' is not allowed; there are {known}{did_you_mean(tag, kinds, likeness=LIKENESS)}"


def _as_section(word: str, path: KeyPath, spec: type[Spec]) -> str:
    """A hint at the setting with the choice `word` in the section at `path`, if `word` was written instead of the whole
    section."""
    for section in _sections_at(spec, path):
        for name, field in section.model_fields.items():
            choice = _nearest(word, [one for one in get_args(field.annotation) if isinstance(one, str)], LIKENESS)
            if choice:
                return f"; did you mean {dotted((*path, name))}={choice}?"
    return ""


def _may_be_null(path: KeyPath, spec: type[Spec]) -> bool:
    *section, name = path
    sections = _sections_at(spec, tuple(section))
    return any(NoneType in get_args(one.model_fields[name].annotation) for one in sections if name in one.model_fields)


REQUIREMENTS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "string_too_short": "text that is not empty",
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "greater than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    **dict.fromkeys(("tuple_type", "list_type"), "a list, such as [a, b]"),
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    **dict.fromkeys(SECTION, "a section (lines of 'key: value')"),
}
"""Type of pydantic's error -> a description of valid values, to follow "must be"."""


def _requirement(details: ErrorDetails) -> str:
    if details["type"] in REQUIREMENTS:
        return REQUIREMENTS[details["type"]].format(**details.get("ctx", {}))
    sentence = details["msg"].removeprefix("Input should be ").removeprefix("String should ")
    return sentence[:1].lower() + sentence[1:]


def _hint(value: Any, kinds: list[str]) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT and "int_type" in kinds:
        return f"; write {int(value)}"
    if isinstance(value, str) and {"int_type", "float_type"} & set(kinds) and _is_number(value):
        return "; remove the quotes"
    if isinstance(value, str) and kinds == ["tuple_type"]:
        return f"; write [{value}]"
    if isinstance(value, (int, float)) and kinds == ["string_type"]:
        return "; put it in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        return float(text) < float("inf")
    except ValueError:
        return False


def _choices(details: ErrorDetails) -> list[str]:
    """The words among a setting's choices."""
    expected = str(details.get("ctx", {}).get("expected", ""))
    return expected.split("'")[1::2]


def _shown(value: Any) -> str:
    """A given value as the user wrote it, shortened if it is long."""
    if value is None:
        return "an empty value"
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _unknown_key(path: KeyPath, spec: type[Spec]) -> str:
    *section, key = path
    sections = _sections_at(spec, tuple(section))
    known = [name for candidate in sections for name in candidate.model_fields]
    ours = SYNONYMS.get(plain(str(key)))
    near = did_you_mean(str(key), known) if ":" not in str(key) and (ours is None or ours in known) else ""
    if not near and ":" in str(key):
        return f"unknown key; in '{str(key).replace(':', ': ', 1)}' a space follows the colon"
    return "unknown key" + (near or _elsewhere(str(key), spec) or f"; there are {', '.join(known)}")


def _elsewhere(word: str, spec: type[Spec]) -> str:
    setting = setting_called(word, spec)
    return f"; did you mean '{setting}'?" if setting else ""


def _sections_at(spec: type[Spec], path: KeyPath) -> list[type[Spec]]:
    """The possible classes of the section at `path`."""
    sections = [spec]
    for part in path:
        if isinstance(part, str):
            sections = [
                inner
                for section in sections
                if part in section.model_fields
                for inner in _sections_in(section.model_fields[part].annotation)
            ]
    return sections


def _sections_in(annotation: Any) -> Iterator[type[Spec]]:
    """The section classes in a field's type: SourceSpec in `tuple[SourceSpec, ...] | str`."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _all_paths(spec: type[Spec], within: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in spec.model_fields.items():
        yield (*within, name)
        for section in _sections_in(field.annotation):
            yield from _all_paths(section, (*within, name))
