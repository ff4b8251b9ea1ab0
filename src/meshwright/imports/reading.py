"""`Reading`: the result of reading other systems' files: our settings, each with its origin, and what became of every
key.

A key becomes a setting, alone or with others; or it claims something that `conclude` compares with the finished recipe;
or it has a named reason why it has no effect on training; or it is listed as not carried over. A key that leaves none
of these is listed, too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.imports.claims import Claim, NoEffect
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run

SHOWN = 200
"""Characters of a value that an origin shows."""
COUNTS = ("ranks", "nodes", "ranks of a node", "accumulation", "accumulation of all ranks", "shard")
COUNTS += ("dp_shard_size", "dp_replicate_size", "replicate", "instances")
NUMBERS = ("beta1", "beta2", "warmup_ratio", "min_lr", "decay steps", "samples", "epochs", "decay_ratio")
"""Facts that enter computations."""
NARROW = {
    "training.master_dtype": "bf16",
    "training.optimizer.state_dtype": "bf16",
    "training.optimizer.rounding": "nearest",
}
"""Settings of weights and moments that have no copy in fp32."""

Rule = str | Callable[["Reading", Any, str], None]
"""The rule for a key: the path of our setting, which gets the value; or a function of (reading, value, origin)."""
Get = Callable[[str], Any]
"""The value of a setting, by its path, in the run for which a file is written."""


@dataclass(frozen=True)
class Form:
    """A rule with its inverse, or one that also knows other words."""

    rule: Callable[["Reading", Any, str], None]
    write: Callable[[Get], Any] | None = None
    """The key's value for a run."""
    even_auto: bool = False
    """Whether it knows what `auto` means, so that no other file has to give the value."""

    def __call__(self, reading: "Reading", value: Any, origin: str) -> None:
        self.rule(reading, value, origin)


@contextmanager
def refusing(text: str) -> Iterator[None]:
    """Raise `UserError` with this text where a value is of a kind that its key never has."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(text) from error


@dataclass
class Reading:
    """Settings, facts and leftovers of one or more files."""

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Path of a setting of ours -> (value, its origin)."""
    facts: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Facts that become settings only in combination: ranks, accumulation, epochs, a kind of sharding."""
    defaults: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """The same, used if no file gives them."""
    without: list[tuple[str, str]] = field(default_factory=list)
    """(key and value, why it has no counterpart)"""
    notes: list[str] = field(default_factory=list)
    """Assumptions made."""
    no_effect: list[tuple[str, NoEffect]] = field(default_factory=list)
    """(key and value, why no value of it has an effect on training)"""
    claims: list[tuple[str, Claim]] = field(default_factory=list)
    """(key and value, what it says about the recipe)"""
    already_so: list[str] = field(default_factory=list)
    """Keys whose claims hold for the finished recipe, each with its claims."""
    seen: list[str] = field(default_factory=list)
    """The origin of every key that was read."""
    is_whole: bool = False
    """Whether a file holds a whole recipe, whose defaults are meant."""
    unknown: list[str] = field(default_factory=list)
    """The origins of keys without a rule."""

    def set(self, path: str, value: Any, origin: str) -> None:
        """Record a setting; if files disagree, the first one wins and the other value is reported."""
        self._note(self.settings, path, value, origin)

    def fact(self, name: str, value: Any, origin: str) -> None:
        """Note a fact, by the same rule."""
        if name in COUNTS:
            check_count(value, origin)
        elif name in NUMBERS:
            check_number(value, origin)
        elif name == "zero" and value not in (0, 1, 2, 3):
            raise UserError(f"{origin}: a ZeRO stage must be 0, 1, 2 or 3")
        self._note(self.facts, name, value, origin)

    def _note(self, known: dict[str, tuple[Any, str]], name: str, value: Any, origin: str) -> None:
        before, where = known.get(name, (value, ""))
        if before != value:
            self.drop(origin, f"{where} sets {name}={before}")
        elif origin not in where:
            known[name] = value, f"{where}; {origin}" if where else origin

    def set_all(self, settings: Mapping[str, Any], origin: str) -> None:
        """Record several settings of one origin."""
        for path, value in settings.items():
            self.set(path, value, origin)

    def track(self, name: str, origin: str) -> None:
        """Add a tracker."""
        names, where = self.settings.get("trackers", ([], ""))
        joined = names if name in names else [*names, name]
        self.settings["trackers"] = joined, f"{where}; {origin}" if where else origin

    def value(self, path: str, default: Any = None) -> Any:
        """A setting's value."""
        return self.settings.get(path, (default, ""))[0]

    def known(self, name: str, default: Any = None) -> Any:
        """A fact's value."""
        return self.facts.get(name, (default, ""))[0]

    def default(self, path: str, value: Any, origin: str) -> None:
        """Record a default of the other system, if it differs from a recipe's."""
        self.defaults.setdefault(path, (value, origin))

    def default_all(self, settings: Mapping[str, Any], origin: str) -> None:
        """Record several defaults of one origin."""
        for path, value in settings.items():
            self.default(path, value, origin)

    def model_ranks(self) -> int:
        """The ranks that share one replica of the model."""
        split = 1
        for axis in ("tp", "pp", "cp"):
            size, origin = self.settings.get(f"layout.{axis}", (1, ""))
            check_count(size, origin)
            split *= size
        return split

    def replicate(self, copies: int, origin: str) -> None:
        """Shard over the ranks that are left for each of several copies, where the number of ranks is known."""
        if copies > 1 and (ranks := self.known("ranks")):
            self.fact("shard", max(1, ranks // (self.model_ranks() * copies)), origin)

    def in_bf16(self, origin: str) -> None:
        """Keep weights and moments in bf16, rounded to the nearest."""
        self.set_all(NARROW, origin)

    def ignore(self, *names: str, reason: NoEffect | str = NoEffect.OFF) -> None:
        """Report the facts of these names that were stated: they have no effect, or no counterpart."""
        for origin in (self.facts[name][1] for name in names if name in self.facts):
            if isinstance(reason, NoEffect):
                self.no_effect.append((origin, reason))
            else:
                self.drop(origin, reason)

    def otherwise(self, path: str, value: Any, origin: str) -> None:
        """Record a setting, if no file has given it; others are worked out from it, so it cannot wait as a default."""
        if path not in self.settings:
            self.set(path, value, origin)

    def count_nodes(self) -> None:
        """The ranks of all nodes, where a launcher's flags tell them."""
        if ranks := self.known("ranks of a node"):
            nodes, where = self.facts.get("nodes", (1, "one node"))
            self.fact("ranks", ranks * nodes, f"{self.facts['ranks of a node'][1]}; {where}")

    def take_back(self, reason: str, *paths: str) -> None:
        """Take back settings that do not count after all, or all of a section (`finetune.`), and report them."""
        for path in [path for path in self.settings if path in paths or path.startswith(_sections(paths))]:
            self.drop(self.settings.pop(path)[1], reason)

    def set_fact(self, path: str, name: str) -> None:
        """Set a setting to a fact, if it was stated."""
        if name in self.facts:
            self.set(path, *self.facts[name])

    def drop(self, origin: str, reason: str) -> None:
        """Record a key without a counterpart."""
        self.without.append((origin, reason))

    def claim(self, origin: str, *claims: Claim) -> None:
        """Record what a key says about the recipe, or several keys together, which `conclude` checks."""
        self.claims += [(origin, claim) for claim in claims]

    def read_inside(self, origin: str) -> None:
        """Note that a key's value has keys of its own, which are read one by one instead of it."""
        self.seen.remove(origin)

    def take(self, values: Mapping[str, Any], rules: Mapping[str, Rule], file: str) -> None:
        """Apply a rule to every key of `values`; keys without one have no counterpart that is known.

        A rule whose key ends in `.*` is for all keys of the section that have none of their own.
        Raises `UserError` if a value is of a kind that its key never has.
        """
        for key, value in values.items():
            if value is None:  # as if it were not there
                continue
            origin = self.read(file, key, value)
            rule = rules.get(key) or of_section(rules, key)
            if value == "auto" and rule is not None and not _knows_auto(rule):
                self.notes.append(f"{origin}: taken from another file, or the recipe's default")
            elif rule is None:
                self.unknown.append(origin)
                self.drop(origin, "unknown, or without a counterpart")
            elif callable(rule):
                with refusing(f"{origin}: this value is not allowed"):
                    rule(self, value, origin)
            else:
                self.set(rule, value, origin)

    def read(self, file: str, key: str, value: Any) -> str:
        """The origin of a key, which has been read."""
        text = str(value)
        origin = f"{file}: {key}={text if len(text) <= SHOWN else f'{text[:SHOWN]}...'}"
        self.seen.append(origin)
        return origin

    def conclude(self, run: Run) -> None:
        """Compare all claims with the finished recipe, and list the keys that left nothing in it."""
        mentioned = "\n".join([*(origin for _, origin in self.settings.values()), *self.notes,
                          *(origin for origin, _ in [*self.without, *self.no_effect])])  # fmt: skip
        for origin in dict.fromkeys(self.seen):
            if _names(mentioned, origin):
                continue
            claims = [claim for claimant, claim in self.claims if _names(claimant, origin)]
            if problems := list(filter(None, (claim.problem(run) for claim in claims))):
                self.drop(origin, "; ".join(problems))
            elif claims:
                self.already_so.append(f"{origin}: {'; '.join(map(str, claims))}")
            else:
                self.drop(origin, "nothing in the recipe comes from it")


def joined(*origins: str) -> str:
    """The origins of a setting, each once."""
    return "; ".join(dict.fromkeys(filter(None, origins)))


def _sections(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in paths if path.endswith("."))


def _knows_auto(rule: Rule) -> bool:
    return isinstance(rule, NoEffect) or (isinstance(rule, Form) and rule.even_auto)


def of_section(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule for all keys of the innermost section that has one."""
    while "." in key:
        key = key.rpartition(".")[0]
        if (rule := rules.get(f"{key}.*")) is not None:
            return rule
    return None


def _names(text: str, origin: str) -> bool:
    """Whether a text names a key with its value."""
    return re.search(rf"(?:^|[\s(;]){re.escape(origin)}(?=$|[\s;:,)])", text, flags=re.MULTILINE) is not None


def check_count(value: Any, origin: str) -> None:
    """Raise `UserError` if a value is not a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**53:
        raise UserError(f"{origin}: must be a whole number, at least 1")


def check_number(value: Any, origin: str) -> None:
    """Raise `UserError` if a value is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**53:
        raise UserError(f"{origin}: must be a number")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every leaf of nested mappings by its dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
