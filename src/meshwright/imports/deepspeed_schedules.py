"""DeepSpeed's optimizer and schedule, with its own defaults (`deepspeed/runtime/lr_schedules.py`, `ops/adam`).

A program that gives DeepSpeed a JSON with an optimizer or a scheduler trains with those, whatever its own arguments
say: only `auto` values come from the arguments. Schedules that end after a number of steps of their own (OneCycle, and
PyTorch's, which DeepSpeed knows by name) become a decay to the run's last step, if the run has as many steps.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from meshwright.imports.claims import Always, NoEffect
from meshwright.imports.reading import Reading, Rule, check_count, check_number, flat, joined
from meshwright.imports.rules import fact, number, unsupported, without
from meshwright.imports.schedules import NAME, lose_schedule
from meshwright.spec.errors import UserError

CYCLES = {"onecycle": "linear", "cosineannealinglr": "cosine", "polynomiallr": "linear", "linearlr": "linear"}
"""Type in small letters -> the recipe's schedule."""
LENGTH = "the schedule's own steps"
"""The fact how many steps a schedule has."""
PARAMS = "scheduler.params."
CONSTANT = "the betas of a recipe are constant"
SMOOTH = "the rate changes at every step"


CYCLE_RULES: Mapping[str, Mapping[str, Rule]] = {
    "onecycle": {
        "cycle_min_lr": number("cycle's least rate"),
        "cycle_max_lr": number("cycle's peak"),
        "cycle_first_step_size": fact("cycle's rise"),
        "cycle_second_step_size": fact("cycle's fall"),
        "cycle_first_stair_count": unsupported(SMOOTH),
        "cycle_second_stair_count": unsupported(SMOOTH),
        "decay_step_size": unsupported("nothing follows the cycle"),
        "decay_lr_rate": unsupported("nothing follows the cycle"),
        "cycle_momentum": unsupported(CONSTANT),
        **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"), without(CONSTANT)),
    },
    "cosineannealinglr": {"T_max": fact("T_max"), "eta_min": number("min_lr")},
    "polynomiallr": {"total_iters": fact("total_iters"), "power": number("power")},
    "linearlr": {
        "start_factor": number("start_factor"),
        "end_factor": number("end_factor"),
        "total_iters": fact("total_iters"),
    },
}
"""Type in small letters -> the rules for its parameters."""


def cycle_rules(kind: str) -> dict[str, Rule]:
    """The rules for the parameters of a schedule."""
    rules = {f"{PARAMS}{key}": rule for key, rule in CYCLE_RULES.get(kind, {}).items()}
    return rules | {f"{PARAMS}verbose": NoEffect.LOGS} if rules else {}


def settle_cycle(reading: Reading, kind: str, file: str) -> tuple[float, str] | None:
    """Set warm-up, final rate and length of a schedule; returns its peak rate, if it has one of its own."""
    default = f"{file} (DeepSpeed's default)"
    if kind == "onecycle":
        return _one_cycle(reading, file, default)
    torch = f"{file} (PyTorch's default)"
    if kind == "cosineannealinglr":
        if "T_max" not in reading.facts:
            raise UserError(f"{file}: scheduler.params.T_max is missing")
        _length(reading, *reading.facts["T_max"])
        reading.facts.setdefault("min_lr", (0.0, torch))
    else:
        _length(reading, *reading.facts.get("total_iters", (5, torch)))
        _line(reading, kind, torch)
    reading.set(WARMUP, 0, torch)
    return None


def _one_cycle(reading: Reading, file: str, default: str) -> tuple[float, str]:
    for key, name in (("cycle_min_lr", "cycle's least rate"), ("cycle_max_lr", "cycle's peak")):
        if name not in reading.facts:
            raise UserError(f"{file}: {PARAMS}{key} is missing")
    rise, where = reading.facts.get("cycle's rise", (2000, default))
    check_count(rise, where)
    fall, fall_origin = reading.facts.get("cycle's fall", (rise, where))
    check_count(fall, fall_origin)
    reading.set(WARMUP, rise, where)
    _length(reading, rise + fall, where if where == fall_origin else f"{where}; {fall_origin}")
    least, least_origin = reading.facts["cycle's least rate"]
    reading.fact("min_lr", least, least_origin)
    if least:
        reading.notes.append(f"{least_origin}: warm-up starts at 0 in a recipe, not at this rate")
    if not any(": scheduler.params.cycle_momentum=" in origin for origin in reading.seen):
        reading.drop(f"{default}: {PARAMS}cycle_momentum=True, from 0.9 to 0.8 and back", CONSTANT)
    return reading.facts["cycle's peak"]


def _line(reading: Reading, kind: str, default: str) -> None:
    """A rate that falls as a line; other powers, and lines that rise, have no counterpart."""
    if kind == "polynomiallr":
        power, where = reading.facts.get("power", (1.0, default))
        if power != 1:
            reading.drop(where, "the rate falls linearly")
        reading.set("training.lr_schedule.final", 0.0, default if where == default else f"{default}; {where}")
        return
    start, where = reading.facts.get("start_factor", (1 / 3, default))
    end, end_origin = reading.facts.get("end_factor", (1.0, default))
    origin = joined(where, end_origin)
    if start == 1 and 0 <= end < 1:
        reading.set("training.lr_schedule.final", end, origin)
    else:
        reading.settings.pop(NAME, None)
        lose_schedule(reading, origin, f"only a line from 1 to less is imported, not from {start:.3g} to {end}")


def _length(reading: Reading, steps: Any, origin: str) -> None:
    check_count(steps, origin)
    reading.fact(LENGTH, steps, origin)


def settle_length(reading: Reading) -> None:
    """Compare a schedule's own steps with the run's, which they are if no file gives others."""
    if LENGTH not in reading.facts:
        return
    length, origin = reading.facts[LENGTH]
    steps = reading.settings.get("training.steps", (None, ""))[0]
    if steps is None:
        reading.set("training.steps", length, origin)
    elif steps != length:
        reading.drop(
            origin, f"the schedule ends after {length} steps; a recipe's ends at the last step of the run, {steps}"
        )


def name_of(values: Mapping[str, Any]) -> str:
    """The type of the schedule of a DeepSpeed file in small letters."""
    section = values.get("scheduler")
    return str(section.get("type") or "").lower() if isinstance(section, Mapping) else ""


OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "muon": "muon"}
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
NO_SCHEDULER, NO_OPTIMIZER = "no scheduler", "no optimizer"
"""The facts that a DeepSpeed file has no scheduler or optimizer; another file may have one."""
DECOUPLED, TORCH_ADAM = "decoupled weight decay", "PyTorch's Adam"
SCHEDULE = "DeepSpeed's schedule"
"""The fact that a DeepSpeed file has a schedule; its value is the recipe's name for it, None if there is none."""
READ, NAMED = "a DeepSpeed file", "the name of DeepSpeed's file"
"""The facts that a DeepSpeed file was read, and that another file names one."""
RATE, PEAK, LEAST = "the optimizer's rate", "the schedule's peak", "the schedule's least rate"
WARMUP, FINAL = "training.lr_schedule.warmup", "training.lr_schedule.final"
LR, MUON_LR = "training.optimizer.lr", "training.optimizer.muon_lr"


def keep_rate(name: str) -> Rule:
    """Keeps a rate as a fact."""
    return lambda reading, value, origin: _keep(reading, name, value, origin)


def keep_least(reading: Reading, value: Any, origin: str) -> None:
    """Keeps `warmup_min_lr`; transformers replaces its `auto` by 0."""
    _keep(reading, LEAST, 0 if value == "auto" else value, origin)


def _keep(reading: Reading, name: str, value: Any, origin: str) -> None:
    if isinstance(value, list):
        reading.drop(origin, "one rate is for all parameters")
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
    for key, value in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if f"params.{key}" not in given:
            reading.set(f"training.optimizer.{key}", value, default)
    of_torch, where = reading.facts.get(TORCH_ADAM, (False, default))
    if "params.weight_decay" not in given:
        decay = 0.01 if of_torch and _is_decoupled(given) else 0.0  # torch.optim.AdamW's default
        reading.set("training.optimizer.weight_decay", decay, where)
    elif TORCH_ADAM in reading.facts:
        reading.no_effect.append((where, NoEffect.KERNEL))
    if DECOUPLED in reading.facts:
        decoupled, origin = reading.facts[DECOUPLED]
        if kind != "adam" and kind != "fusedadam":
            reading.no_effect.append((origin, NoEffect.UNREAD))  # of AdamW and Muon it always is
        elif decoupled:
            reading.claim(origin, Always("weight decay is always decoupled (AdamW)"))
        else:
            reading.drop(origin, "weight decay is always decoupled (AdamW)")
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
    elif LEAST in reading.facts:
        reading.claim(origin, Always("warm-up always starts at 0"))
    if kind == "warmupcosinelr" and "params.cos_min_ratio" not in given:
        reading.set(FINAL, 1e-4, default)
    elif kind == "warmupdecaylr" and least:
        reading.fact("min_lr", least, origin)  # the rate falls to it after warm-up, too
    elif kind == "warmupdecaylr":
        reading.set(FINAL, 0.0, origin)


def settle_what_no_file_gives(reading: Reading) -> None:
    """Report what a DeepSpeed file leaves to the program that uses it, if no other file gives it, and which file is
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
    for given_rate in (peak, rate):
        if given_rate and (not peak or given_rate[0] == peak[0]):
            reading.set(LR, *given_rate)
        elif given_rate and peak:
            reading.drop(given_rate[1], f"the schedule sets the rate: {peak[1]}: {peak[0]}")


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
