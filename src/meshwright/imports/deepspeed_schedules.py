"""DeepSpeed's optimizer and schedule, with its own defaults (`deepspeed/runtime/lr_schedules.py`, `ops/adam`).

A program that gives DeepSpeed a JSON with an optimizer or a scheduler trains with those, whatever its own arguments
say: only `auto` values come from the arguments.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from meshwright.imports.deepspeed_cycles import CYCLES, settle_cycle, settle_length
from meshwright.imports.reading import Reading, Rule, check_number, flat

OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "muon": "muon"}
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
NO_SCHEDULER, NO_OPTIMIZER = "no scheduler", "no optimizer"
"""The facts that a DeepSpeed file has no scheduler or optimizer; another file may have one."""
SCHEDULE = "DeepSpeed's schedule"
"""The fact that a DeepSpeed file has a schedule; its value is the recipe's name for it, None if there is none."""
READ, NAMED = "a DeepSpeed file", "the name of DeepSpeed's file"
"""The facts that a DeepSpeed file was read, and that another file names one."""
RATE, PEAK, LEAST = "the optimizer's rate", "the schedule's peak", "the schedule's least rate"
NAME, WARMUP, FINAL = (f"training.lr_schedule.{key}" for key in ("name", "warmup", "final"))
LR, MUON_LR = "training.optimizer.lr", "training.optimizer.muon_lr"


def keep_rate(name: str) -> Rule:
    """Keeps a rate as a fact."""
    return lambda reading, value, origin: _keep(reading, name, value, origin)


def keep_least(reading: Reading, value: Any, origin: str) -> None:
    """Keeps `warmup_min_lr`; transformers replaces its `auto` by 0."""
    _keep(reading, LEAST, 0 if value == "auto" else value, origin)


def _keep(reading: Reading, name: str, value: Any, origin: str) -> None:
    if isinstance(value, list):
        reading.give_up(origin, "one rate is for all parameters")
    else:
        check_number(value, origin)
        reading.fact(name, value, origin)


def keep_named(reading: Reading, value: Any, origin: str) -> None:
    """Keeps the name of the DeepSpeed file that another file mentions."""
    reading.fact(NAMED, PurePath(value).name, origin)


def settle_optimizer(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set the optimizer's constants that the file omits."""
    given = _section(values, "optimizer")
    kind, default = _kind(given), f"{file} (DeepSpeed's default)"
    if not kind:
        reading.fact(NO_OPTIMIZER, True, file)
    if kind not in OPTIMIZERS:
        return
    decay = 0.01 if given.get("params.torch_adam") and _is_decoupled(given) else 0.0  # torch.optim.AdamW's default
    for key, value in (("betas", [0.9, 0.999]), ("eps", 1e-8), ("weight_decay", decay)):
        if f"params.{key}" not in given:
            reading.set(f"training.optimizer.{key}", value, default)
    if kind != "muon" and given.get("params.adam_w_mode") is False and not _is_decoupled(given):
        reading.give_up(f"{file}: optimizer.params.adam_w_mode=False", "weight decay is always decoupled (AdamW)")
    if RATE not in reading.facts and "params.lr" not in given:
        reading.fact(RATE, 0.02 if kind == "muon" else 1e-3, default)
    if kind == "muon" and RATE in reading.facts and MUON_LR not in reading.settings:
        reading.set(MUON_LR, *reading.facts[RATE])


def settle_schedule(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set the schedule's settings that the file omits, and the peak rate."""
    given = _section(values, "scheduler")
    kind, default = _kind(given), f"{file} (DeepSpeed's default)"
    if not kind:
        reading.fact(NO_SCHEDULER, True, file)
    if kind in CYCLES and (peak := settle_cycle(reading, kind, file)):
        reading.fact(PEAK, *peak)
    _settle_peak(reading, given, default)
    if kind and kind not in SCHEDULES:
        ours = CYCLES.get(kind) if NAME in reading.settings else None
        reading.fact(SCHEDULE, ours, f"{file}: scheduler.type={given['type']}")
    if kind not in SCHEDULES:
        return
    reading.fact(SCHEDULE, SCHEDULES[kind], f"{file}: scheduler.type={given['type']}")
    if "params.warmup_num_steps" not in given:  # "auto" is another file's number
        reading.set(WARMUP, 1000, default)
    if "params.warmup_type" not in given:
        reading.notes.append(
            f"{file}: {given['type']} warms up logarithmically by default; a recipe's warm-up is linear"
        )
    least, origin = reading.facts.get(LEAST, (0, default))
    if least:
        reading.notes.append(f"{origin}: warm-up starts at 0 in a recipe, not at this rate")
    if kind == "warmupcosinelr" and "params.cos_min_ratio" not in given:
        reading.set(FINAL, 1e-4, default)
    elif kind == "warmupdecaylr" and least:
        reading.fact("min_lr", least, origin)  # the rate falls to it after warm-up, too
    elif kind == "warmupdecaylr":
        reading.set(FINAL, 0.0, origin)


def settle_what_no_file_gives(reading: Reading) -> None:
    """Tell what a DeepSpeed file leaves to the program that uses it, if no other file gives it, and which file is
    missing.

    Without a scheduler, DeepSpeed keeps the rate as it is.
    """
    if NAMED in reading.facts:
        wanted, origin = reading.facts[NAMED]
        read = reading.known(READ)
        if read != wanted:
            reading.notes.append(f"{origin}: " + (f"{read} was taken for it" if read else "pass that file too"))
    settle_length(reading)
    if NO_SCHEDULER in reading.facts and NAME not in reading.settings:
        file = reading.facts[NO_SCHEDULER][1]
        reading.set(NAME, "constant", f"{file} (DeepSpeed's default: no scheduler)")
        reading.set(WARMUP, 0, f"{file} (DeepSpeed's default: no scheduler)")
        reading.notes.append(
            f"{file} has no scheduler, so the rate is constant; if the program that uses it has a schedule, set "
            "training.lr_schedule"
        )
    if NO_OPTIMIZER in reading.facts and not any(path.startswith("training.optimizer.") for path in reading.settings):
        reading.notes.append(
            f"{reading.facts[NO_OPTIMIZER][1]} has no optimizer: the program that uses it makes one, which the recipe "
            "does not know; set training.optimizer"
        )


def _settle_peak(reading: Reading, given: Mapping[str, Any], default: str) -> None:
    """The peak rate: the schedule's, or else the optimizer's."""
    kind, key = _kind(given), "params.warmup_max_lr"
    rate, peak = reading.facts.get(RATE), reading.facts.get(PEAK)
    if kind == "warmupdecaylr" and key not in given:
        peak = (0.001, default)
    elif kind == "warmuplr" and key not in given and rate:
        reading.notes.append(
            f"{default}: WarmupLR without warmup_max_lr keeps the optimizer's rate in DeepSpeed 0.19; earlier "
            "releases have 0.001"
        )
    for found in (peak, rate):
        if found and (not peak or found[0] == peak[0]):
            reading.set(LR, *found)
        elif found and peak:
            reading.give_up(found[1], f"the schedule sets the rate: {peak[1]}: {peak[0]}")


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys of a section; nothing if there is none."""
    section = values.get(name)
    return flat(section) if isinstance(section, Mapping) else {}


def _kind(given: Mapping[str, Any]) -> str:
    """The optimizer's or scheduler's type in small letters."""
    return str(given.get("type") or "").lower()


def _is_decoupled(given: Mapping[str, Any]) -> bool:
    """Whether weight decay is AdamW's: always for AdamW, for Adam unless it is switched off."""
    return _kind(given) == "adamw" or given.get("params.adam_w_mode", True) is not False
