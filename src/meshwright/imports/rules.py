"""Rules for keys: what a key of another system does to a `Reading`."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import EvenAuto, Reading, Rule, check_count


def apply(rule: Rule, reading: Reading, value: Any, origin: str) -> None:
    """Apply a rule to a value."""
    if isinstance(rule, str):
        reading.set(rule, value, origin)
    else:
        rule(reading, value, origin)


def fact(name: str) -> Rule:
    """Keeps the value as a fact."""
    return lambda reading, value, origin: reading.fact(name, value, origin)


def ignored(reading: Reading, value: Any, origin: str) -> None:
    """For a key that states nothing: every recipe is so, or another rule reads it."""


def nothing(why: str) -> Rule:
    """No counterpart, for a reason; reported unless the value switches it off."""
    return EvenAuto(lambda reading, value, origin: reading.give_up(origin, why) if value else None)


def only(expected: Any, why: str) -> Rule:
    """The only value that a recipe can express; others are reported, for a reason."""
    return lambda reading, value, origin: None if value == expected else reading.give_up(origin, why)


def sections(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules for the sections of dotted keys where they are empty."""
    names = {key[:place] for key in rules for place, letter in enumerate(key) if letter == "."}
    return {name: nothing("a section of settings") for name in sorted(names)}


def positive(path: str) -> Rule:
    """The setting gets the value if it is above 0, else null."""
    return lambda reading, value, origin: reading.set(path, value if value and value > 0 else None, origin)


def above_zero(path: str) -> Rule:
    """The setting gets the value if it is above 0; otherwise the key is as if it were not there."""
    return lambda reading, value, origin: reading.set(path, value, origin) if value > 0 else None


def listed(path: str) -> Rule:
    """The setting gets a list, which a text alone is one item of."""
    return lambda reading, value, origin: reading.set(path, [value] if isinstance(value, str) else list(value), origin)


def degree(path: str, also: Mapping[str, Any] | None = None) -> Rule:
    """The setting gets a degree above 1, the default of every layout, and other settings what comes with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        if value > 1:
            reading.set_all({path: value, **(also or {})}, origin)

    return rule


def unless_none(path: str) -> Rule:
    """The setting gets the value, unless it is the text "None", which some systems read as Python does."""
    return lambda reading, value, origin: None if value in ("None", "none") else reading.set(path, value, origin)


def always(rule: Rule, result: Any) -> Rule:
    """What the rule does with `result`, whatever the value."""
    return lambda reading, value, origin: apply(rule, reading, result, origin)


def when(rule: Rule, result: Any) -> Rule:
    """What the rule does with `result`, where the value is true."""
    return lambda reading, value, origin: apply(rule, reading, result, origin) if value is True else None


def if_any(rule: Rule, result: Any) -> Rule:
    """What the rule does with `result`, unless the value is false, 0 or empty."""
    return lambda reading, value, origin: apply(rule, reading, result, origin) if value else None


def choice(rule: Rule, known: Mapping[Any, Any], supported: str = "") -> Rule:
    """What the rule does with the value's entry in a table; other values have no counterpart."""

    def found(reading: Reading, value: Any, origin: str) -> None:
        if value in known:
            apply(rule, reading, known[value], origin)
        else:
            reading.give_up(origin, f"supported: {supported or ', '.join(known)}")

    return found


def words(path: str, known: Mapping[str, Any]) -> Rule:
    """The setting by a table of words, which may be in capitals; other words have no counterpart."""
    by_word = choice(path, known, ", ".join(sorted(known)))
    return lambda reading, value, origin: apply(by_word, reading, str(value).lower().replace("-", "_"), origin)


def dotted(sections: Mapping[str, str]) -> list[str]:
    """Dotted keys from the words of each section; the section "" has the keys without one."""
    return [f"{section}.{key}" if section else key for section, keys in sections.items() for key in keys.split()]
