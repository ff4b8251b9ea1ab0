"""Rules for keys: what a key of another system does to a `Reading`, and its value in a file that is written.

The path of a setting, and most of these rules, have an inverse; so a key is stated once for both directions.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshwright.imports.claims import Always, Claim, Has, HasNot, NoEffect, shown
from meshwright.imports.reading import Form, Get, Reading, Rule, check_count
from meshwright.spec.errors import UserError

FACTS: Mapping[str, Callable[[Get], Any]] = {
    "accumulation": lambda get: (
        get("training.global_batch") // (get("training.micro_batch") * get("layout.data_parallel"))
    ),
    "beta1": lambda get: get("training.optimizer.betas")[0],
    "beta2": lambda get: get("training.optimizer.betas")[1],
    "decay steps": lambda get: get("training.steps"),
    "min_lr": lambda get: float(f"{get('training.optimizer.lr') * get('training.lr_schedule.final'):.12g}"),
    "replicas": lambda get: get("layout.data_parallel"),
}
"""A fact's value in a run, where every system means the same by it."""


def apply(rule: Rule, reading: Reading, value: Any, origin: str) -> None:
    """Apply a rule to a value."""
    if isinstance(rule, str):
        reading.set(rule, value, origin)
    else:
        rule(reading, value, origin)


def write(rule: Rule, get: Get) -> Any:
    """The value of a rule's key in a run."""
    if isinstance(rule, str):
        return get(rule)
    assert isinstance(rule, Form), "a function alone has no inverse"
    assert rule.write, "the rule has no inverse"
    return rule.write(get)


def both(rule: Rule, inverse: Callable[[Get], Any]) -> Form:
    """A rule with another inverse."""
    return Form(lambda reading, value, origin: apply(rule, reading, value, origin), inverse)


def fact(name: str) -> Rule:
    """Keeps the value as a fact."""
    return Form(lambda reading, value, origin: reading.fact(name, value, origin), FACTS.get(name))


def claims(claim: Claim) -> Rule:
    """Only claims something about the recipe, whatever the value."""
    return lambda reading, value, origin: reading.claim(origin, claim)


def claims_value(path: str) -> Rule:
    """Claims that the setting has this value, which another key sets."""
    return Form(lambda reading, value, origin: reading.claim(origin, Has(path, value)), lambda get: get(path))


def no_effect(reason: NoEffect) -> Rule:
    """No value of the key has an effect on training."""
    return Form(lambda reading, value, origin: reading.no_effect.append((origin, reason)), even_auto=True)


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
    return Form(lambda reading, value, origin: reading.drop(origin, reason), even_auto=True)


def unsupported(reason: str) -> Rule:
    """Something that Meshwright lacks; a value that switches it off is as in every recipe."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value and value not in OFF:
            reading.drop(origin, reason)
        else:
            reading.claim(origin, Always("it is off, as in every recipe"))

    return Form(rule, even_auto=True)


OFF = ("none", "None", "no", "off", "disabled", "disable")


def only(expected: Any, reason: str) -> Rule:
    """The only value that a recipe can express, as `reason` says; others are reported with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value == expected:
            reading.claim(origin, Always(reason))
        else:
            reading.drop(origin, reason)

    return Form(rule, lambda get: expected)


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
    return both(
        lambda reading, value, origin: reading.set(path, value if value and value > 0 else None, origin),
        lambda get: get(path) or 0.0,
    )


def above_zero(path: str, otherwise: Claim) -> Rule:
    """The setting gets the value if it is above 0; otherwise the key says what `otherwise` claims."""
    return both(
        lambda reading, value, origin: (
            reading.set(path, value, origin) if value > 0 else reading.claim(origin, otherwise)
        ),
        lambda get: get(path),
    )


def whole(path: str) -> Rule:
    """The setting gets a number, which is written as an integer where it is one."""
    return both(
        path, lambda get: int(number) if (number := get(path)) is not None and number == int(number) else number
    )


def listed(path: str) -> Rule:
    """The setting gets a list, which a text alone is one item of."""
    return both(
        lambda reading, value, origin: reading.set(path, [value] if isinstance(value, str) else list(value), origin),
        lambda get: get(path) or None,
    )


def degree(path: str, also: Mapping[str, Any] | None = None) -> Rule:
    """The setting gets a degree above 1, the default of every layout, and other settings what comes with it."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        if value > 1:
            reading.set_all({path: value, **(also or {})}, origin)
        else:
            reading.claim(origin, Has(path, 1))

    return both(rule, lambda get: get(path))


def unless_none(path: str) -> Rule:
    """The setting gets the value, unless it is the text "None", which some systems read as Python does."""
    return both(
        lambda reading, value, origin: (
            reading.claim(origin, Always("as if it were not there"))
            if value in ("None", "none")
            else reading.set(path, value, origin)
        ),
        lambda get: get(path),
    )


def tracker(name: str) -> Rule:
    """Adds a tracker, whatever the value; left out without it."""
    return both(lambda reading, value, origin: reading.track(name, origin), lambda get: name in get("trackers") or None)


def no_tracker(name: str) -> Claim:
    """Claims that the recipe does not have a tracker."""
    return HasNot("trackers", name)


def always(rule: Rule, result: Any) -> Rule:
    """What the rule does with `result`, whatever the value; left out where it is not so."""
    return Form(lambda reading, value, origin: apply(rule, reading, result, origin),
                lambda get: write(rule, get) == result or None, even_auto=True)  # fmt: skip


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
            reading.drop(origin, "supported: true, false")

    return both(chosen, lambda get: write(rule, get) == result)


def if_any(rule: Rule, result: Any, off: Claim | None = None) -> Rule:
    """What the rule does with `result`, unless the value is false, 0 or empty, which claims `off` as in `when`."""
    claim = off or _without(rule, result)
    return both(
        lambda reading, value, origin: apply(rule, reading, result, origin) if value else reading.claim(origin, claim),
        lambda get: write(rule, get) == result,
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
            reading.drop(origin, f"supported: {supported or ', '.join(known)}")

    return both(chosen, inverse(rule, known))


def words(path: str, known: Mapping[str, Any]) -> Rule:
    """The setting by a table of words, which may be in capitals; other words have no counterpart."""
    by_word = choice(path, known, ", ".join(sorted(known)))
    return both(
        lambda reading, value, origin: apply(by_word, reading, str(value).lower().replace("-", "_"), origin),
        inverse(path, known),
    )


def inverse(rule: Rule, known: Mapping[Any, Any]) -> Callable[[Get], Any]:
    """The first name that a table has for a value. Writing raises `UserError` for a value without a name."""

    def written(get: Get) -> Any:
        value = write(rule, get)
        for theirs, ours in known.items():
            if ours == value:
                return theirs
        setting = f"{rule}=" if isinstance(rule, str) else ""
        raise UserError(f"{setting}{shown(value)}: this export supports {', '.join(map(shown, known.values()))}")

    return written


def dotted(sections: Mapping[str, str]) -> list[str]:
    """Dotted keys from the words of each section; the section "" has the keys without one."""
    return [f"{section}.{key}" if section else key for section, keys in sections.items() for key in keys.split()]
