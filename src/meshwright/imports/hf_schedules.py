"""Learning-rate schedules of Hugging Face transformers (`lr_scheduler_type`, `lr_scheduler_kwargs`).

A step's rate is theirs of the step before: their first step of warm-up has rate 0, a recipe's has 1 / warm-up of the
peak.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.imports.deepspeed_schedules import SCHEDULE
from meshwright.imports.reading import Reading
from meshwright.imports.schedules import lose_schedule
from meshwright.spec.errors import UserError

TYPE, OPTIONS = "lr_scheduler_type", "lr_scheduler_kwargs"
WARMUP = "training.lr_schedule.warmup"
FINAL = "training.lr_schedule.final"


def keep_type(reading: Reading, value: Any, origin: str) -> None:
    """Keep the schedule's name for `settle_schedule`."""
    if not isinstance(value, str):
        raise UserError(f"{origin}: must be a schedule's name, as in cosine")
    reading.fact(TYPE, value, origin)


def keep_options(reading: Reading, value: Any, origin: str) -> None:
    """Keep the schedule's arguments, a mapping or its JSON."""
    options = json.loads(value) if isinstance(value, str) else value
    if options:
        reading.fact(OPTIONS, dict(options), origin)


def settle_schedule(reading: Reading, default: str, origin: str) -> None:
    """Set the schedule of the name and arguments that were kept; without a name it is `default`, from `origin`."""
    name, where = reading.facts.get(TYPE, (default, origin))
    if name not in SCHEDULES:
        if SCHEDULE in reading.facts:
            _give_up_schedule(reading)
        else:
            lose_schedule(reading, where, f"supported: {', '.join(SCHEDULES)}")
            if OPTIONS in reading.facts:
                reading.give_up(reading.facts[OPTIONS][1], f"{where} has no counterpart")
        return
    options, given = reading.facts.get(OPTIONS, ({}, where))
    kind, known, settle = SCHEDULES[name]
    if SCHEDULE in reading.facts and (reading.facts[SCHEDULE][0] != kind or name == "constant"):
        _give_up_schedule(reading)
        return
    use = reading.set if TYPE in reading.facts else reading.default
    use("training.lr_schedule.name", kind, where)
    settle(reading, options, given)
    if kind != "constant" and FINAL not in reading.settings and "min_lr" not in reading.facts:
        use(FINAL, 0.0, where)
    for key, value in options.items():
        if key not in known or known[key] not in (value, None):
            reading.give_up(f"{given}: {key}={value}", f"the schedule {kind} does not have this setting")


def _give_up_schedule(reading: Reading) -> None:
    """Report the schedule that was kept: with a scheduler in DeepSpeed's file, that one is used."""
    for kept in (TYPE, OPTIONS):
        if kept in reading.facts:
            reading.give_up(reading.facts[kept][1], f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")


def _nothing(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    pass


def _without_warmup(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """`constant` ignores the steps of warm-up."""
    for found, name in ((reading.settings, WARMUP), (reading.facts, "warmup_ratio")):
        value, where = found.pop(name, (0, ""))
        if value:
            reading.give_up(where, f"transformers ignores warm-up with {TYPE}=constant; constant_with_warmup has it")
    reading.set(WARMUP, 0, origin)


def _to_end(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    _floor(reading, {"min_lr": options.get("lr_end", 1e-7)}, origin)


def _floor(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """The least rate, as a share of the peak or by itself."""
    if "min_lr_rate" in options:
        reading.set(FINAL, options["min_lr_rate"], origin)
    elif "min_lr" in options:
        reading.fact("min_lr", options["min_lr"], origin)


def _stable(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """Warm-up, a constant rate, decay."""
    floor = options.get("min_lr_ratio", 0.0)
    reading.set(FINAL, floor, origin)
    if "num_decay_steps" in options:
        reading.set("training.lr_schedule.decay", options["num_decay_steps"], origin)
    if (fall := options.get("decay_type", "cosine")) != "linear":
        reading.give_up(f"{origin}: decay_type={fall}", "wsd always decays linearly")
    if floor:
        reading.give_up(f"{origin}: min_lr_ratio={floor}", "warm-up always starts at 0, not at the minimum rate")


Settle = Callable[[Reading, Mapping[str, Any], str], None]
SCHEDULES: Mapping[str, tuple[str, Mapping[str, Any], Settle]] = {
    "linear": ("linear", {}, _nothing),
    "polynomial": ("linear", {"power": 1.0, "lr_end": None}, _to_end),
    "cosine": ("cosine", {"num_cycles": 0.5}, _nothing),
    "cosine_with_restarts": ("cosine", {"num_cycles": 1}, _nothing),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}, _floor),
    "cosine_warmup_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}, _floor),
    "constant": ("constant", {}, _without_warmup),
    "constant_with_warmup": ("constant", {}, _nothing),
    "warmup_stable_decay": (
        "wsd",
        {"num_decay_steps": None, "min_lr_ratio": None, "decay_type": None, "warmup_type": "linear", "num_cycles": 0.5},
        _stable,
    ),
}
"""Their name -> the recipe's, the arguments that are read (None: any value; else the one that the recipe's equals), and
what else is set."""
