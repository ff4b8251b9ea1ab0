"""Rules of keys: what a key of another system does to a `Reading`, and its value for a run that is written.

Each function makes a `Form`: a rule with its inverse, and words for the page of the system. A path or a fact alone is
a rule, too. What has no inverse, such as a key without effect, is written only where it is given a value for that.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from meshwright.imports.claims import Always, Claim, Has, HasNot, NoEffect, shown
from meshwright.imports.facts import Fact, check_count
from meshwright.imports.names import Names
from meshwright.imports.reading import Form, Reading, Rule
from meshwright.imports.stated import interval as steps_of
from meshwright.imports.stated import setting
from meshwright.spec.run import ResolvedRun

Written = Callable[[ResolvedRun], Any]
OFF = ("none", "None", "no", "off", "disabled", "disable")


def write(rule: Rule, resolved: ResolvedRun) -> Any:
    """The value that a rule's key has for a run; None where the key is left out."""
    if isinstance(rule, str):
        return setting(resolved, rule)
    if isinstance(rule, Fact):
        return rule.of(resolved) if rule.of else None
    return rule.write(resolved) if isinstance(rule, Form) else None


def about(rule: Rule) -> str:
    """The setting, or what else a rule is about."""
    if isinstance(rule, Fact):
        return rule.what
    return rule if isinstance(rule, str) else rule.about if isinstance(rule, Form) else ""


def note(rule: Rule) -> str:
    """What else a rule says about its key's values."""
    if isinstance(rule, Form):
        return rule.note
    return "" if isinstance(rule, str | Fact) else (rule.__doc__ or "").strip()


def both(read: Rule, write: Any, also: str = "") -> Form:
    """A rule with another inverse: a function of the run, or a constant."""
    writes = write if callable(write) else lambda resolved: write
    return Form(lambda reading, value, origin: reading.apply(read, value, origin), writes, about(read) or also,
                note(read), isinstance(read, Form) and read.even_auto)  # fmt: skip


def read_only(rule: Rule) -> Form:
    """A key that is never written, such as an older name."""
    return both(rule, None)


def where(counts: Callable[[ResolvedRun], bool], rule: Rule) -> Form:
    """A key that is written for some runs only."""
    return both(rule, lambda resolved: write(rule, resolved) if counts(resolved) else None)


def claims(claim: Claim) -> Form:
    """Only claims something about the recipe, whatever the value."""
    return Form(lambda reading, value, origin: reading.claim(origin, claim), note=str(claim))


def claims_value(path: str) -> Form:
    """Claims that the setting has this value, which another key sets."""
    return Form(lambda reading, value, origin: reading.claim(origin, Has(path, value)),
                lambda resolved: setting(resolved, path), path, "the same, once more")  # fmt: skip


def no_effect(reason: NoEffect) -> Form:
    """No value of the key has an effect on training."""
    return Form(lambda reading, value, origin: reading.no_effect.append((origin, reason)), note=reason, even_auto=True)


def no_effects(keys: Mapping[NoEffect, Mapping[str, str]]) -> dict[str, Rule]:
    """The rules of keys without an effect: reason -> section -> words; see `dotted`."""
    rules: dict[str, Rule] = {}
    for reason, sections in keys.items():
        for key in dotted(sections):
            assert key not in rules, key
            rules[key] = no_effect(reason)
    return rules


def without(reason: str) -> Form:
    """No counterpart, whatever the value."""
    return Form(lambda reading, value, origin: reading.give_up(origin, reason), note=f"not carried over: {reason}",
                even_auto=True)  # fmt: skip


def unsupported(reason: str) -> Form:
    """Something that Meshwright lacks; a value that switches it off is as in every recipe."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value and value not in OFF:
            reading.give_up(origin, reason)
        else:
            reading.claim(origin, Always("it is off, as in every recipe"))

    return Form(read, note=f"not carried over, unless it is off: {reason}", even_auto=True)


def only(expected: Any, reason: str) -> Form:
    """The only value that a recipe can express, as `reason` says; others are reported with it."""
    return one_of((expected,), reason)


def one_of(expected: Collection[Any], reason: str) -> Form:
    """The values that all mean what every recipe does, as `reason` says; others are reported with it."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value in expected:
            reading.claim(origin, Always(reason))
        else:
            reading.give_up(origin, reason)

    return Form(read, note=f"only {', '.join(map(shown, expected))}: {reason}")


def sections(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules for the sections of dotted keys where they are empty."""
    names = {key[:place] for key in rules for place, letter in enumerate(key) if letter == "."}
    return {name: unsupported("a section of settings") for name in sorted(names)}


def positive(path: str) -> Form:
    """The setting gets the value if it is above 0, else null."""
    return Form(lambda reading, value, origin: reading.set(path, value if value and value > 0 else None, origin),
                lambda resolved: setting(resolved, path) or 0.0, path, "0: null")  # fmt: skip


def above_zero(path: str, otherwise: Claim) -> Form:
    """The setting gets the value if it is above 0; otherwise the key says what `otherwise` claims."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value > 0:
            reading.set(path, value, origin)
        else:
            reading.claim(origin, otherwise)

    return Form(read, lambda resolved: setting(resolved, path), path, f"0: {otherwise}")


def listed(path: str) -> Form:
    """The setting gets a list, which a text alone is one item of."""
    return Form(lambda reading, value, origin: reading.set(path, as_list(value), origin),
                lambda resolved: setting(resolved, path) or None, path)  # fmt: skip


def as_list(value: Any) -> list[Any]:
    """A list; a text alone is one item."""
    return [value] if isinstance(value, str) else list(value)


def degree(path: str, also: Mapping[str, Any] | None = None) -> Form:
    """The setting gets a degree above 1, the default of every layout, and other settings what comes with it."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        if value > 1:
            reading.set_all({path: value, **(also or {})}, origin)
        else:
            reading.claim(origin, Has(path, 1))

    return Form(read, lambda resolved: setting(resolved, path), path)


def interval(path: str) -> Form:
    """An interval in steps; one as long as the run means after the last step only, which `import_files` finds out."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        reading.set(path, value, origin)
        reading.intervals.add(path)

    return Form(read, lambda resolved: steps_of(resolved, path), path, "as long as the run: 0")


def tracker(name: str) -> Form:
    """Adds a tracker, whatever the value."""
    return Form(lambda reading, value, origin: reading.track(name, origin),
                lambda resolved: name in resolved.run.trackers, f"trackers: {name}")  # fmt: skip


def no_tracker(name: str) -> Claim:
    """Claims that the recipe does not have a tracker."""
    return HasNot("trackers", name)


def always(rule: Rule, result: Any) -> Form:
    """What the rule does with `result`, whatever the value; written as true."""
    return Form(lambda reading, value, origin: reading.apply(rule, result, origin),
                lambda resolved: True if write(rule, resolved) == result else None,
                about(rule), f"given: {shown(result)}", even_auto=True)  # fmt: skip


def when(rule: Rule, result: Any = True, off: Claim | None = None) -> Form:
    """What the rule does with `result`, where the value is true; a false one claims `off`, by default that the setting
    does not have this result."""
    claim = off or _without(rule, result)

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value is True:
            reading.apply(rule, result, origin)
        elif value is False:
            reading.claim(origin, claim)
        else:
            reading.give_up(origin, "supported: true, false")

    return Form(read, lambda resolved: write(rule, resolved) == result, about(rule), f"true: {shown(result)}")


def if_any(rule: Rule, result: Any = True, off: Claim | None = None) -> Form:
    """What the rule does with `result`, unless the value is false, 0 or empty, which claims `off` as in `when`."""
    claim = off or _without(rule, result)

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value:
            reading.apply(rule, result, origin)
        else:
            reading.claim(origin, claim)

    return Form(read, lambda resolved: write(rule, resolved) == result, about(rule), f"given: {shown(result)}")


def _without(rule: Rule, result: Any) -> Claim:
    assert isinstance(rule, str), "what does the recipe say where this is off?"
    return HasNot(rule, result)


def choice(rule: Rule, known: Mapping[Any, Any], supported: str = "") -> Form:
    """What the rule does with the value's entry in a table; other values have no counterpart."""

    def read(reading: Reading, value: Any, origin: str) -> None:
        if value in known:
            reading.apply(rule, known[value], origin)
        else:
            reading.give_up(origin, f"supported: {supported or ', '.join(map(shown, known))}")

    return Form(read, about=about(rule), note=", ".join(f"{shown(one)}: {shown(ours)}" for one, ours in known.items()))


def words(rule: Rule, known: Mapping[str, Any]) -> Form:
    """What the rule does with a word's entry in a table, which may be in capitals; others have no counterpart."""
    by_word = choice(rule, known, ", ".join(sorted(known)))
    return replace(
        by_word, read=lambda reading, value, origin: by_word.read(reading, str(value).lower().replace("-", "_"), origin)
    )


def named(names: Names, rule: Rule | None = None, supported: str = "") -> Form:
    """The setting by its names in the system, or what the rule does with the setting's value."""
    return both(
        choice(rule or names.path, names.read, supported), lambda resolved: names.write(setting(resolved, names.path))
    )


def dotted(sections: Mapping[str, str]) -> list[str]:
    """Dotted keys from the words of each section; the section "" has the keys without one."""
    return [f"{section}.{key}" if section else key for section, keys in sections.items() for key in keys.split()]
