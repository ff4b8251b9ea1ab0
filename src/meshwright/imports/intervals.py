"""Steps between evaluations and between checkpoints, as the Trainer of transformers counts them: a number below 1 is a
share of all steps, which a recipe does not have."""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule

EVALUATES, SAVES = "training.evaluation.every", "checkpoint.every"


def every(path: str) -> Rule:
    """The setting gets a number of steps; a share of all steps is kept for `settle_shares`."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if 0 < value < 1:
            keep_share(reading, path, value, origin)
        else:
            reading.set(path, int(value) if int(value) == value else value, origin)

    return rule


def keep_share(reading: Reading, path: str, share: float, origin: str) -> None:
    """Keep an interval that is a share of all steps."""
    reading.fact(_fact(path), share, origin)


def settle_shares(reading: Reading) -> None:
    """Name the intervals that are shares of all steps, with their steps if the run's are known."""
    steps = reading.settings.get("training.steps", (None, ""))[0]
    for path in (EVALUATES, SAVES):
        if _fact(path) not in reading.facts:
            continue
        share, origin = reading.facts[_fact(path)]
        number = f": {math.ceil(share * steps)}" if steps else ""
        reading.give_up(origin, f"a share of all steps; set {path}, in steps{number}")


def ignore_interval(reading: Reading, path: str, key: str, why: str) -> None:
    """Take back an interval that this key has set."""
    for found, name in ((reading.settings, path), (reading.facts, _fact(path))):
        if f": {key}=" in found.get(name, (0, ""))[1]:
            reading.give_up(found.pop(name)[1], why)


def settle_intervals(reading: Reading, values: Mapping[str, Any], origin: str) -> None:
    """The Trainer's intervals, which count only under the strategy `steps`.

    YAML reads the strategy `no` as false.
    """
    evaluates = values.get("eval_strategy", values.get("evaluation_strategy", "no"))
    for path, key, strategy in (
        (EVALUATES, "eval_steps", evaluates),
        (SAVES, "save_steps", values.get("save_strategy", "steps")),
    ):
        if strategy != "steps":
            ignore_interval(reading, path, key, f"the Trainer ignores it with the strategy {strategy}")
        elif values.get(key) is None:
            default_interval(reading, path, values, origin)


def default_interval(reading: Reading, path: str, values: Mapping[str, Any], origin: str) -> None:
    """The interval under the strategy `steps` if no key gives it."""
    steps = values.get("logging_steps", 500) if path == EVALUATES else 500
    if isinstance(steps, int):
        reading.default(path, steps, origin)


def _fact(path: str) -> str:
    return f"{path} as a share"
