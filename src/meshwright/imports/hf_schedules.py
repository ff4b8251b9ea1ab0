"""Schedules and intervals of the Trainer of Hugging Face transformers.

A step's learning rate is theirs of the step before: their first step of warm-up has rate 0, a recipe's has 1 / warm-up
of the peak. Their intervals below 1 are shares of all steps, which a recipe does not have.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.imports.claims import Always, Has
from meshwright.imports.deepspeed_schedules import SCHEDULE
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import cases
from meshwright.imports.schedules import lose_schedule
from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import parse_json

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
    reading.fact(_share(path), share, origin)


def settle_shares(reading: Reading) -> None:
    """Name the intervals that are shares of all steps, with their steps if the run's are known."""
    steps = reading.settings.get("training.steps", (None, ""))[0]
    for path in (EVALUATES, SAVES):
        if _share(path) not in reading.facts:
            continue
        share, origin = reading.facts[_share(path)]
        number = f": {math.ceil(share * steps)}" if steps else ""
        reading.drop(origin, f"a share of all steps; set {path}, in steps{number}")


def ignore_interval(reading: Reading, path: str, key: str, reason: str) -> None:
    """Take back an interval that this key has set."""
    for known, name in ((reading.settings, path), (reading.facts, _share(path))):
        if f": {key}=" in known.get(name, (0, ""))[1]:
            reading.drop(known.pop(name)[1], reason)


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


def _share(path: str) -> str:
    return f"{path} as a share"


TYPE, OPTIONS = "lr_scheduler_type", "lr_scheduler_kwargs"
WARMUP = "training.lr_schedule.warmup"
FINAL = "training.lr_schedule.final"


def check_schedule(value: Any, origin: str) -> None:
    """Raise `UserError` if a value is no schedule's name."""
    if not isinstance(value, str):
        raise UserError(f"{origin}: must be a schedule's name, as in cosine")


def keep_options(reading: Reading, value: Any, origin: str) -> None:
    """Keep the schedule's arguments, a mapping or its JSON."""
    options = parse_json(value, origin) if isinstance(value, str) else value
    if options:
        reading.fact(OPTIONS, dict(options), origin)
    else:
        reading.claim(origin, Always("it is empty"))


def settle_schedule(reading: Reading, default: str, origin: str) -> None:
    """Set the schedule of the name and arguments that were kept; without a name it is `default`, from `origin`."""
    name, where = reading.facts.get(TYPE, (default, origin))
    if name not in SCHEDULES:
        if SCHEDULE in reading.facts:
            _give_up_schedule(reading)
        else:
            lose_schedule(reading, where, f"supported: {', '.join(SCHEDULES)}")
            reading.ignore(OPTIONS, reason=f"{where} has no counterpart")
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
            reading.drop(f"{given}: {key}={value}", f"the schedule {kind} does not have this setting")
    if options and all(known.get(key) == value for key, value in options.items()):
        reading.claim(given, Always(f"these are constants of the schedule {kind}"))


def _give_up_schedule(reading: Reading) -> None:
    """Report the schedule that was kept: with a scheduler in DeepSpeed's file, that one is used."""
    reading.ignore(TYPE, OPTIONS, reason=f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")


def _nothing(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    pass


def _without_warmup(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """`constant` ignores the steps of warm-up."""
    for known, name in ((reading.settings, WARMUP), (reading.facts, "warmup_ratio")):
        value, where = known.pop(name, (0, ""))
        if value:
            reading.drop(where, f"transformers ignores warm-up with {TYPE}=constant; constant_with_warmup has it")
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
        reading.drop(f"{origin}: decay_type={fall}", "wsd always decays linearly")
    if floor:
        reading.drop(f"{origin}: min_lr_ratio={floor}", "warm-up always starts at 0, not at the minimum rate")


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


def strategy(path: str) -> Rule:
    """What an interval counts. YAML reads the strategy `no` as false; then only the last step is meant."""

    return cases({"steps": IN_STEPS, ("no", False): Has(path, 0)}, IN_STEPS.reason)


IN_STEPS = Always("intervals are in steps")
