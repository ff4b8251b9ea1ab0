"""When axolotl saves and evaluates, and the least rate of its schedule: what follows from several of its keys."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.deepspeed_schedules import SCHEDULE
from meshwright.imports.hf_arguments import EVALUATES, SAVES
from meshwright.imports.hf_schedules import FINAL, TYPE
from meshwright.imports.reading import Reading, check_count, check_number

FLOOR = "cosine_min_lr_ratio"


def settle_intervals(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set the steps between checkpoints and between evaluations, by the strategy that axolotl derives.

    YAML reads the strategy `no` as false. A share of the steps is reported where it is read.
    """
    default = f"{file} (axolotl's default)"
    saves = values.get("save_strategy")
    _per_epoch(reading, values, "saves_per_epoch", SAVES, file)
    if not values.get("save_steps"):
        if saves == "steps":
            reading.default(SAVES, 500, f"{file} (the Trainer's default)")
        elif saves is None and not values.get("saves_per_epoch"):
            reading.notes.append(f"{file}: axolotl saves after each epoch by default; set {SAVES}, in steps, for more")
    elif saves not in (None, "steps"):
        _refuse(reading, SAVES, "save_steps", f"axolotl does not take it with save_strategy={saves}")
    if not values.get("save_total_limit") and (SAVES in reading.settings or SAVES in reading.defaults):
        reading.default("checkpoint.keep_last", 4, default)
    evaluates = values.get("eval_strategy", values.get("evaluation_strategy"))
    held_out = bool(values.get("val_set_size") or values.get("test_datasets"))
    _per_epoch(reading, values, "evals_per_epoch", EVALUATES, file, held_out=held_out)
    if not held_out:
        _refuse(reading, EVALUATES, "eval_steps", "without val_set_size it has no effect")
    elif evaluates not in (None, "steps"):
        _refuse(reading, EVALUATES, "eval_steps", f"axolotl does not take it with eval_strategy={evaluates}")
    elif evaluates == "steps" and not values.get("eval_steps") and values.get("logging_steps"):
        steps = values["logging_steps"]
        check_count(steps, f"{file}: logging_steps={steps}")
        reading.default(EVALUATES, steps, f"{file}: logging_steps={steps} (the Trainer's default for eval_steps)")
    elif evaluates == "steps" and not values.get("eval_steps"):
        reading.give_up(f"{default}: eval_steps=logging_steps", f"half a percent of all steps; set {EVALUATES}")


def _refuse(reading: Reading, path: str, key: str, why: str) -> None:
    """Take an interval back that its strategy excludes."""
    if f": {key}=" in reading.settings.get(path, (0, ""))[1]:
        reading.give_up(reading.settings.pop(path)[1], why)


def _per_epoch(
    reading: Reading, values: Mapping[str, Any], key: str, path: str, file: str, *, held_out: bool = True
) -> None:
    """Report a number of times per epoch, as the share of all steps that axolotl makes of it."""
    times = values.get(key)
    if not times:
        return
    origin, epochs = f"{file}: {key}={times}", values.get("num_epochs", 1)
    check_number(times, origin)
    check_number(epochs, f"{file}: num_epochs={epochs}")
    if held_out and times * epochs == 1:
        return  # after the last step
    if held_out:
        reading.give_up(origin, f"every 1/{times * epochs:g} of all steps; set {path}, in steps")
    else:
        reading.give_up(origin, "without val_set_size it has no effect")


def settle_floor(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set the least rate of a cosine, which no other schedule has, in place of its default of 0."""
    floor = values.get(FLOOR)
    if floor is None:
        return
    origin = f"{file}: {FLOOR}={floor}"
    kind = reading.known(TYPE, "cosine")
    if SCHEDULE in reading.facts:
        reading.give_up(origin, f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")
    elif kind != "cosine":
        reading.give_up(origin, f"axolotl reads it with lr_scheduler=cosine only, not with {kind}")
    else:
        reading.settings[FINAL] = (floor, origin)
