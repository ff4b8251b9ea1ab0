"""`Reading`: the result of reading other systems' files: our settings, each with its origin, and keys without a
counterpart."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.errors import UserError

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
    seen: list[str] = field(default_factory=list)
    """The origin of every key that was read."""

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
            self.give_up(origin, f"{where} sets {name}={before}")
        elif origin not in where:
            known[name] = value, f"{where}; {origin}" if where else origin

    def set_all(self, settings: Mapping[str, Any], origin: str) -> None:
        """Record several settings of one origin."""
        for path, value in settings.items():
            self.set(path, value, origin)

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

    def already_so(self) -> list[str]:
        """Keys without effect: switched off, true for every recipe, or repeating another key."""
        origins = [origin for _, origin in self.settings.values()]
        told = "\n".join([*origins, *(origin for origin, _ in self.without), *self.notes])
        return [origin for origin in self.seen if origin not in told]

    def give_up(self, origin: str, why: str) -> None:
        """Record a key without a counterpart."""
        self.without.append((origin, why))

    def take(self, values: Mapping[str, Any], rules: Mapping[str, Rule], file: str) -> None:
        """Apply a rule to every key of `values`; keys without one have no counterpart that is known.

        Raises `UserError` if a value is of a kind that its key never has.
        """
        for key, value in values.items():
            if value is None:  # as if it were not there
                continue
            shown = str(value)
            origin = f"{file}: {key}={shown if len(shown) <= SHOWN else f'{shown[:SHOWN]}...'}"
            rule = rules.get(key)
            self.seen.append(origin)
            if value == "auto" and rule is not None and not isinstance(rule, EvenAuto):
                self.notes.append(f"{origin}: taken from another file, or the recipe's default")
            elif rule is None:
                self.give_up(origin, "unknown, or without a counterpart")
            elif isinstance(rule, str):
                self.set(rule, value, origin)
            else:
                with refusing(f"{origin}: this value is not allowed"):
                    rule(self, value, origin)


@dataclass(frozen=True)
class EvenAuto:
    """A rule that knows what `auto` means, so that no other file has to give the value."""

    rule: Callable[[Reading, Any, str], None]

    def __call__(self, reading: Reading, value: Any, origin: str) -> None:
        self.rule(reading, value, origin)


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
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
