"""Rules for keys: what a key of another system does to a `Reading`."""

from collections.abc import Collection, Mapping
from typing import Any

from meshwright.imports.claims import Always, Claim, Has, HasNot, NoEffect
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


def claims(claim: Claim) -> Rule:
    """Only claims something about the recipe, whatever the value."""
    return lambda reading, value, origin: reading.claim(origin, claim)


def claims_value(path: str) -> Rule:
    """Claims that the setting has this value, which another key sets."""
    return lambda reading, value, origin: reading.claim(origin, Has(path, value))


def no_effect(reason: NoEffect) -> Rule:
    """No value of the key has an effect on training."""
    return EvenAuto(lambda reading, value, origin: reading.no_effect.append((origin, reason)))


def no_effects(keys: Mapping[NoEffect, Mapping[str, str]]) -> dict[str, Rule]:
    """The rules of keys without an effect: reason -> section -> words; see `dotted`."""
    rules: dict[str, Rule] = {}
    for reason, sections in keys.items():
        for key in dotted(sections):
            assert key not in rules, key
            rules[key] = no_effect(reason)
    return rules


def without(reason: str) -> Rule:
    """No counterpart, whatever the value."""
    return EvenAuto(lambda reading, value, origin: reading.give_up(origin, reason))


def unsupported(reason: str) -> Rule:
    """Something that Meshwright lacks; a value that switches it off is as in every recipe."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value and value not in OFF:
            reading.give_up(origin, reason)
        else:
            reading.claim(origin, Always("it is off, as in every recipe"))

    return EvenAuto(rule)


OFF = ("none", "None", "no", "off", "disabled", "disable")


def only(expected: Any, reason: str) -> Rule:
    """The only value that a recipe can express, as `reason` says; others are reported with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value == expected:
            reading.claim(origin, Always(reason))
        else:
            reading.give_up(origin, reason)

    return rule


def one_of(expected: Collection[Any], reason: str) -> Rule:
    """The values that all mean what every recipe does, as `reason` says; others are reported with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        apply(only(value if value in expected else None, reason), reading, value, origin)

    return rule


def sections(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules for the sections of dotted keys where they are empty."""
    names = {key[:place] for key in rules for place, letter in enumerate(key) if letter == "."}
    return {name: unsupported("a section of settings") for name in sorted(names)}


def positive(path: str) -> Rule:
    """The setting gets the value if it is above 0, else null."""
    return lambda reading, value, origin: reading.set(path, value if value and value > 0 else None, origin)


def above_zero(path: str, otherwise: Claim) -> Rule:
    """The setting gets the value if it is above 0; otherwise the key says what `otherwise` claims."""
    return lambda reading, value, origin: (
        reading.set(path, value, origin) if value > 0 else reading.claim(origin, otherwise)
    )


def listed(path: str) -> Rule:
    """The setting gets a list, which a text alone is one item of."""
    return lambda reading, value, origin: reading.set(path, [value] if isinstance(value, str) else list(value), origin)


def degree(path: str, also: Mapping[str, Any] | None = None) -> Rule:
    """The setting gets a degree above 1, the default of every layout, and other settings what comes with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        if value > 1:
            reading.set_all({path: value, **(also or {})}, origin)
        else:
            reading.claim(origin, Has(path, 1))

    return rule


def unless_none(path: str) -> Rule:
    """The setting gets the value, unless it is the text "None", which some systems read as Python does."""
    return lambda reading, value, origin: (
        reading.claim(origin, Always("as if it were not there"))
        if value in ("None", "none")
        else reading.set(path, value, origin)
    )


def tracker(name: str) -> Rule:
    """Adds a tracker, whatever the value."""
    return lambda reading, value, origin: reading.track(name, origin)


def no_tracker(name: str) -> Claim:
    """Claims that the recipe does not have a tracker."""
    return HasNot("trackers", name)


def always(rule: Rule, result: Any) -> Rule:
    """What the rule does with `result`, whatever the value."""
    return EvenAuto(lambda reading, value, origin: apply(rule, reading, result, origin))


def when(rule: Rule, result: Any, off: Claim | None = None) -> Rule:
    """What the rule does with `result`, where the value is true; a false one claims `off`, by default that the setting
    does not have this result."""
    claim = off or _without(rule, result)

    def chosen(reading: Reading, value: Any, origin: str) -> None:
        if value is True:
            apply(rule, reading, result, origin)
        elif value is False:
            reading.claim(origin, claim)
        else:
            reading.give_up(origin, "supported: true, false")

    return chosen


def if_any(rule: Rule, result: Any, off: Claim | None = None) -> Rule:
    """What the rule does with `result`, unless the value is false, 0 or empty, which claims `off` as in `when`."""
    claim = off or _without(rule, result)
    return lambda reading, value, origin: (
        apply(rule, reading, result, origin) if value else reading.claim(origin, claim)
    )


def _without(rule: Rule, result: Any) -> Claim:
    assert isinstance(rule, str), "what does the recipe say where this is off?"
    return HasNot(rule, result)


def choice(rule: Rule, known: Mapping[Any, Any], supported: str = "") -> Rule:
    """What the rule does with the value's entry in a table; other values have no counterpart."""

    def chosen(reading: Reading, value: Any, origin: str) -> None:
        if value in known:
            apply(rule, reading, known[value], origin)
        else:
            reading.give_up(origin, f"supported: {supported or ', '.join(known)}")

    return chosen


def words(path: str, known: Mapping[str, Any]) -> Rule:
    """The setting by a table of words, which may be in capitals; other words have no counterpart."""
    by_word = choice(path, known, ", ".join(sorted(known)))
    return lambda reading, value, origin: apply(by_word, reading, str(value).lower().replace("-", "_"), origin)


def dotted(sections: Mapping[str, str]) -> list[str]:
    """Dotted keys from the words of each section; the section "" has the keys without one."""
    return [f"{section}.{key}" if section else key for section, keys in sections.items() for key in keys.split()]
