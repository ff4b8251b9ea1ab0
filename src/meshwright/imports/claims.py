"""What keys without a setting say: claims, which are compared with the finished recipe, and reasons why a key has no
effect on training."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.spec.base import Spec
from meshwright.spec.run import Run


class NoEffect(StrEnum):
    """Why no value of a key changes what is trained. A key has exactly one of these reasons."""

    LOGS = "it changes only what is printed and logged"
    NAMES = "it only names or describes the run"
    READS = "it changes only how data are read ahead"
    CACHE = "it changes only where prepared data are kept"
    KERNEL = "it only chooses another kernel for the same formula"
    OVERLAP = "it changes only when ranks communicate, and in which pieces"
    MEMORY = "it changes only memory and speed"
    LAUNCH = "it only tells how processes are started and joined"
    GUARDS = "it is about timeouts, checks and debugging"
    SAVES = "it changes only how checkpoints are written"
    RESUMES = "it counts only where a run is continued"
    EVALUATES = "it changes only how evaluations are computed"
    GENERATES = "it counts only where the model generates text"
    HUB = "it is about the hub of models and access to it"
    CODE = "no code beside a model is ever run"
    CLASS = "it only names a class, whose settings are read one by one"
    TOKENIZER = "the tokenizer's own files are read"
    DRAWS = "it changes only which random numbers are drawn"
    UNREAD = "the system itself does not read it"
    NAMED = "it names a value, which counts where other keys refer to it"
    OFF = "it configures something that is switched off"
    ALONE = "one rank has nothing to share with others"
    OVERRULED = "another key counts instead"

    def __call__(self, reading: Any, value: Any, origin: str) -> None:
        """As a rule: whatever the value, even `auto`."""
        reading.no_effect.append((origin, self))


class Claim:
    """What a key says about the recipe. As a rule: the key says it, whatever its value."""

    def problem(self, run: Run) -> str:
        """How the recipe differs; empty if it does not."""
        return ""

    def __call__(self, reading: Any, value: Any, origin: str) -> None:
        reading.claim(origin, self)


@dataclass(frozen=True)
class Has(Claim):
    """The recipe has this value."""

    path: str
    value: Any

    def problem(self, run: Run) -> str:
        actual = value_at(run, self.path)
        return "" if actual == plain(self.value) else f"the recipe has {self.path}={shown(actual)}"

    def __str__(self) -> str:
        return f"the recipe has {self.path}={shown(plain(self.value))}"


@dataclass(frozen=True)
class HasNot(Claim):
    """The recipe has another value than this; of several, not this one among them."""

    path: str
    value: Any

    def problem(self, run: Run) -> str:
        actual = value_at(run, self.path)
        same = self.value in actual if isinstance(actual, list) else actual == plain(self.value)
        return f"the recipe has {self.path}={shown(actual)}" if same else ""

    def __str__(self) -> str:
        return f"the recipe does not have {self.path}={shown(plain(self.value))}"


@dataclass(frozen=True)
class Always(Claim):
    """Every recipe is so, whatever its settings."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def value_at(run: Spec, path: str) -> Any:
    """A setting's value, with lists for tuples; None where the recipe lacks the section.

    `layout.offload` may be a word for a whole section, which `layout.tiers` is.
    """
    value: Any = run
    for part in path.replace("layout.offload.", "layout.tiers.").split("."):
        value = getattr(value, part, None)
    return plain(value)


def plain(value: Any) -> Any:
    """A value as in YAML; of a section, what differs from its defaults."""
    if isinstance(value, Spec):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def shown(value: Any) -> str:
    """A value as in a recipe."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)
