"""Rules for keys: what a key of another system does to a `Reading`, and its value in a file that is written.

The path of a setting, and most of these rules, have an inverse; so a key is stated once for both directions.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshwright.imports.claims import Always, Claim, Has, HasNot, NoEffect, shown
from meshwright.imports.reading import Form, Get, Reading, Rule, check_count, check_number
from meshwright.spec.data import HUB
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


Lost = Callable[[Reading, str, str], None]
"""What is done with (reading, origin, reason) of a value without a counterpart."""


def apply(rule: Rule, reading: Reading, value: Any, origin: str) -> None:
    """Apply a rule to a value."""
    if callable(rule):
        rule(reading, value, origin)
    else:
        reading.set(rule, value, origin)


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


def fact(name: str, stated: Any = None, check: Callable[[Any, str], None] | None = None) -> Rule:
    """Keeps the value as a fact, or what is `stated` whatever the value; `check` raises `UserError` for other kinds."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if check is not None:
            check(value, origin)
        reading.fact(name, value if stated is None else stated, origin)

    return Form(rule, FACTS.get(name))


def number(name: str) -> Rule:
    """Keeps a number as a fact."""
    return fact(name, check=check_number)


def counted(path: str) -> Rule:
    """The setting gets a whole number above 0."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        reading.set(path, value, origin)

    return both(rule, lambda get: get(path))


def sets(settings: Mapping[str, Any], note: str = "") -> Rule:
    """Sets these settings, whatever the value, and notes what was assumed."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        reading.set_all(settings, origin)
        reading.notes += [f"{origin}: {note}"] if note else []

    return rule


def in_turn(*rules: Rule) -> Rule:
    """What several rules do with one value."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        for one in rules:
            apply(one, reading, value, origin)

    return rule


def cases(outcomes: Mapping[Any, Rule], otherwise: Rule | str = "", word: Callable[[Any], Any] = lambda value: value):
    """What the rule of a value does, which may be one of a tuple of values; `word` makes the value comparable.

    `otherwise`: the rule of other values, or the reason why they have no counterpart.
    """
    table = {one: rule for given, rule in outcomes.items() for one in (given if isinstance(given, tuple) else (given,))}
    other = otherwise if callable(otherwise) else without(otherwise or f"supported: {', '.join(map(str, table))}")

    def rule(reading: Reading, value: Any, origin: str) -> None:
        given = word(value)
        chosen = next((rule for one, rule in table.items() if one == given and type(one) is type(given)), other)
        apply(chosen, reading, value, origin)

    return Form(rule)


def lower(value: Any) -> str:
    """A word that may be in capitals; YAML reads `no` as false."""
    return str(value).lower()


def last_name(value: Any) -> str:
    """The last name of a class or function with its modules."""
    return str(value).rpartition(".")[2]


def either(path: str, on: Any, off: Any) -> Rule:
    """The setting gets one value where the key's is true, the other where it is false."""
    return both(
        lambda reading, value, origin: reading.set(path, on if value else off, origin), lambda get: get(path) == on
    )


def by_sign(above: Rule, otherwise: Rule) -> Rule:
    """What one rule does with a number above 0, and another with other values."""
    return lambda reading, value, origin: apply(above if value > 0 else otherwise, reading, value, origin)


def if_so(on: Rule, off: Rule) -> Rule:
    """What one rule does with a value that is not false, 0 or empty, and another with others."""
    return lambda reading, value, origin: apply(on if value else off, reading, value, origin)


def claims_value(path: str) -> Rule:
    """Claims that the setting has this value, which another key sets."""
    return Form(lambda reading, value, origin: reading.claim(origin, Has(path, value)), lambda get: get(path))


def no_effect(reason: NoEffect) -> Rule:
    """No value of the key has an effect on training."""
    return reason


def no_effects(keys: Mapping[NoEffect, Mapping[str, str]]) -> dict[str, Rule]:
    """The rules of keys without an effect: reason -> section -> words; see `dotted`."""
    rules: dict[str, Rule] = {}
    for reason, sections in keys.items():
        for key in dotted(sections):
            assert key not in rules, key
            rules[key] = reason
    return rules


def without(reason: str) -> Rule:
    """No counterpart, whatever the value."""
    return Form(lambda reading, value, origin: reading.drop(origin, reason), even_auto=True)


def unsupported(reason: str) -> Rule:
    """Something that Meshwright lacks; a value that switches it off is as in every recipe."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        apply(without(reason) if value and value not in OFF else IS_OFF, reading, value, origin)

    return Form(rule, even_auto=True)


OFF = ("none", "None", "no", "off", "disabled", "disable")
IS_OFF = Always("it is off, as in every recipe")


def only(expected: Any, reason: str) -> Rule:
    """The only value that a recipe can express, as `reason` says; others are reported with it."""
    return both(
        lambda reading, value, origin: apply(
            Always(reason) if value == expected else without(reason), reading, value, origin
        ),
        lambda get: expected,
    )


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


def above_zero(path: str, otherwise: Rule) -> Rule:
    """The setting gets the value if it is above 0; otherwise the key says what `otherwise` claims."""
    return both(by_sign(path, otherwise), lambda get: get(path))


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


def split_words(value: Any) -> list[str]:
    """The words of a list, or of a text with commas between them."""
    return [str(word).strip() for word in (value.split(",") if isinstance(value, str) else value)]


def targets(every: str = "all-linear") -> Rule:
    """The modules with adapters; the word `every` means all linear layers."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        names = split_words(value)
        reading.set("finetune.targets", "all-linear" if names == [every] else names, origin)

    return both(rule, lambda get: every if get("finetune.targets") == "all-linear" else get("finetune.targets"))


def held_out(reading: Reading, value: Any, origin: str) -> None:
    """The share of data for evaluation; a count has no counterpart."""
    if value < 1:
        reading.set("data.held_out", value, origin)
    else:
        reading.drop(origin, "data.held_out is a fraction, not a count")


def place(name: Any, *endings: str) -> str:
    """The path of a data set that is named: of a local one, which begins or ends so, or else of one on the hub."""
    return str(name) if str(name).startswith((".", "/")) or str(name).endswith(endings) else f"{HUB}{name}"


def groups(undecayed: Callable[[Mapping[str, Any]], bool]) -> Rule:
    """Groups of parameters by names: here norms and biases never decay, and every rate is the same."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        for group in value:
            if undecayed(group):
                reading.fact("undecayed", True, origin)
                reading.claim(origin, NEVER_DECAY)
            else:
                reason = "weight decay never applies to norms and biases, and all parameters have one learning rate"
                reading.drop(f"{origin.split('=')[0]}: {group}", reason)

    return rule


NEVER_DECAY = Always("norms and biases never decay")


def degree(path: str, also: Mapping[str, Any] | None = None, one: Rule | None = None) -> Rule:
    """The setting gets a degree above 1, the default of every layout, and other settings what comes with it; `one` is
    the rule of the degree 1."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_count(value, origin)
        apply(sets({path: value, **(also or {})}) if value > 1 else one or Has(path, 1), reading, value, origin)

    others = (also or {}).items()
    return both(rule, lambda get: get(path) if all(get(other) == value for other, value in others) else None)


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


def when(rule: Rule, result: Any, off: Rule | None = None) -> Rule:
    """What the rule does with `result`, where the value is true; a false one claims `off`, by default that the setting
    does not have this result."""
    chosen = cases({True: always(rule, result), False: off or _without(rule, result)}, "supported: true, false")
    return both(chosen, lambda get: write(rule, get) == result)


def if_any(rule: Rule, result: Any, off: Rule | None = None) -> Rule:
    """What the rule does with `result`, unless the value is false, 0 or empty, which claims `off` as in `when`."""
    return both(if_so(always(rule, result), off or _without(rule, result)), lambda get: write(rule, get) == result)


def _without(rule: Rule, result: Any) -> Claim:
    assert isinstance(rule, str), "what does the recipe say where this is off?"
    return HasNot(rule, result)


def choice(rule: Rule, known: Mapping[Any, Any], supported: str = "", lost: Lost = Reading.drop) -> Rule:
    """What the rule does with the value's entry in a table; other values have no counterpart, and are `lost`."""

    def chosen(reading: Reading, value: Any, origin: str) -> None:
        if value in known:
            apply(rule, reading, known[value], origin)
        else:
            lost(reading, origin, f"supported: {supported or ', '.join(known)}")

    return both(chosen, inverse(rule, known))


def words(path: str, known: Mapping[str, Any], lost: Lost = Reading.drop) -> Rule:
    """The setting by a table of words, which may be in capitals; other words have no counterpart."""
    by_word = choice(path, known, ", ".join(sorted(known)), lost)
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


def same(rules: Mapping[str, Rule], keys: Mapping[str, str]) -> dict[str, Rule]:
    """The rules of keys that another table has under another name: key -> name."""
    return {key: rules[name] for key, name in keys.items()}


def flags_of(sections: Mapping[str, str]) -> dict[str, str]:
    """Keys that are flags of Megatron-LM with _ for -: key -> flag; `sections` as in `dotted`."""
    return {key: key.rpartition(".")[2].replace("_", "-") for key in dotted(sections)}


PEFT: Mapping[str, Rule] = {
    "r": "finetune.rank",
    "lora_alpha": whole("finetune.alpha"),
    "lora_dropout": "finetune.dropout",
    "target_modules": targets(),
    "modules_to_save": listed("finetune.train"),
    "use_dora": when("finetune.dora", True),
    "use_rslora": when("finetune.rslora", True),
}
"""peft's names of LoRA's settings, which other systems have with prefixes."""


def peft(prefix: str, *keys: str) -> dict[str, Rule]:
    """The rules of some of peft's names, or of all, with a prefix."""
    return {f"{prefix}{key.removeprefix(prefix)}": PEFT[key] for key in keys or PEFT}


def dotted(sections: Mapping[str, str]) -> list[str]:
    """Dotted keys from the words of each section; the section "" has the keys without one."""
    return [f"{section}.{key}" if section else key for section, keys in sections.items() for key in keys.split()]
