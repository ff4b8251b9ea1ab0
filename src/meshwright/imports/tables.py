"""`Table`: the keys of another system, each stated once, from which its files are read and written.

A row is a key and its rule. A rule that is a path of a recipe, as in

    "optimizer.lr": "training.optimizer.lr"

sets that setting where the key is read, and has the setting's value where a file is written. A rule that is a `Fact`
does the same with something that no setting says alone, such as the number of data-parallel ranks: what follows from
several facts is set once all keys of a file are read (functions `settle...` of a system's reader), and a fact knows its
own value in a run. Other values need a conversion: a `Form` of `rules`, which has both directions, as `named(DTYPES)`
for words, `when("training.compile")` for a switch, `positive("training.clip")` for a number whose 0 means none. What
Meshwright lacks is `unsupported`, what no value of a key changes is `no_effect`, and both are written only where the
system wants the key to be there. `read_only` is for older names of a key, `where` for keys that only some runs have.

Defaults are by setting or fact, as the system's own code has them: they count where no file gives the key. Files that
are written state every key, because defaults change.

So a key without a rule is unknown, a row without an inverse is not written, a recipe that does not come back as it was
is refused (`engines/written.py`), and the pages of systems list the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.imports.facts import Fact
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import write
from meshwright.spec.run import ResolvedRun


@dataclass(frozen=True)
class Table:
    """The keys of a system's files."""

    system: str
    """Its name, as in "Nanotron's default"."""
    rules: Mapping[str, Rule]
    """By dotted keys. A key that ends in `.*` stands for all others of its section."""
    defaults: Mapping[str | Fact, Any] = field(default_factory=dict)
    """Setting or fact -> its value where no file gives the key."""
    source: str = ""
    """Where the system's code has them."""

    def take(self, reading: Reading, values: Mapping[str, Any], file: str) -> str:
        """Read keys, and keep the defaults; returns the defaults' origin."""
        reading.take(values, self.rules, file)
        default = f"{file} ({self.system}'s default)"
        for about, value in self.defaults.items():
            if isinstance(about, Fact):
                reading.fact_defaults.setdefault(about, (value, default))
            else:
                reading.default(about, value, default)
        return default

    def write(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The keys of a run and their values, in the order of the table."""
        found = {key: write(rule, resolved) for key, rule in self.rules.items()}
        return {key: value for key, value in found.items() if value is not None}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections in sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *around, last = key.split(".")
        place = found
        for part in around:
            place = place.setdefault(part, {})
        place[last] = value
    return found
