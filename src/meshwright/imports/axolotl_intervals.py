"""How often an axolotl configuration evaluates and saves (`_configure_save_and_eval_strategy` of its builders)."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Has, NoEffect
from meshwright.imports.hf_schedules import (
    EVALUATES,
    SAVES,
    default_interval,
    every,
    ignore_interval,
    keep_share,
    strategy,
)
from meshwright.imports.reading import Reading, Rule, check_number
from meshwright.imports.rules import number
from meshwright.spec.errors import UserError

IN_STEPS = "intervals are in steps"
KEYS = (
    (EVALUATES, "eval_steps", "evals_per_epoch", ("eval_strategy", "evaluation_strategy")),
    (SAVES, "save_steps", "saves_per_epoch", ("save_strategy",)),
)
"""Setting -> the keys for its steps, for its number in an epoch, and for its strategy."""


RULES: Mapping[str, Rule] = {
    **{steps: every(path) for path, steps, _, _ in KEYS},
    **{often: number(often) for _, _, often, _ in KEYS},
    **{name: strategy(path) for path, _, _, names in KEYS for name in names},
}


def settle_intervals(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set both intervals. A number in an epoch is a share of all steps; without any key axolotl saves after each epoch.

    Raises `UserError` for keys that axolotl refuses beside each other.
    """
    default = f"{file} (axolotl's default)"
    for path, steps, often, names in KEYS:
        given = next((values[name] for name in names if name in values), None)
        if values.get(steps) and values.get(often):
            raise UserError(f"{file}: {often}={values[often]}: axolotl refuses {steps} beside it; remove one of them")
        if values.get(steps) and given not in (None, "steps"):
            raise UserError(f"{file}: {steps}={values[steps]}: axolotl refuses the strategy {given} beside it")
        if often in reading.facts:
            _settle_per_epoch(reading, values, path, often, file)
        elif not values.get(steps) and given == "steps":
            default_interval(reading, path, values, default)
        elif path == SAVES and not values.get(steps) and given is None:
            reading.notes.append(f"{default}: it saves after each epoch; {IN_STEPS} here, so set {SAVES}")
    if not values.get("val_set_size") and not values.get("test_datasets"):
        _without_data(reading, values, file)


def _settle_per_epoch(reading: Reading, values: Mapping[str, Any], path: str, often: str, file: str) -> None:
    times, origin = reading.facts[often]
    epochs = values.get("num_epochs", 1)
    where = f"{file}: num_epochs={epochs}" if "num_epochs" in values else f"{file} (axolotl's default: num_epochs=1)"
    check_number(epochs, where)
    if times < 0 or epochs <= 0:
        raise UserError(f"{origin}; {where}: must be above 0")
    if times * epochs > 1:
        keep_share(reading, path, 1 / (times * epochs), f"{origin}; {where}")
    else:  # after the last step only, as without an interval
        reading.claim(origin, Has(path, 0))


def _without_data(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Without data for it, axolotl never evaluates."""
    names = [name for path, _, _, names in KEYS if path == EVALUATES for name in names if name in values]
    reading.no_effect += [(f"{file}: {name}={values[name]}", NoEffect.OFF) for name in names]
    if isinstance(values.get("eval_steps"), int):
        ignore_interval(reading, EVALUATES, "eval_steps", "without val_set_size there is nothing to evaluate")
    reading.defaults.pop(EVALUATES, None)
