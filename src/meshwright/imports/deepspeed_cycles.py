"""DeepSpeed's schedules that end after a number of steps of their own: OneCycle, and PyTorch's, which it knows by name.

Those with a counterpart become a decay to the run's last step, if the run has as many steps.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, check_count, check_number, fact, nothing
from meshwright.imports.schedules import NAME, lose_schedule
from meshwright.spec.errors import UserError

CYCLES = {"onecycle": "linear", "cosineannealinglr": "cosine", "polynomiallr": "linear", "linearlr": "linear"}
"""Type in small letters -> the recipe's schedule."""
STEPS, WARMUP = "training.steps", "training.lr_schedule.warmup"
LENGTH = "the schedule's own steps"
"""The fact how many steps a schedule has."""
PARAMS = "scheduler.params."
CONSTANT = "the betas of a recipe are constant"
SMOOTH = "the rate changes at every step"


def _kept(name: str) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        check_number(value, origin)
        reading.fact(name, value, origin)

    return rule


RULES: Mapping[str, Mapping[str, Rule]] = {
    "onecycle": {
        "cycle_min_lr": _kept("cycle's least rate"),
        "cycle_max_lr": _kept("cycle's peak"),
        "cycle_first_step_size": fact("cycle's rise"),
        "cycle_second_step_size": fact("cycle's fall"),
        "cycle_first_stair_count": nothing(SMOOTH),
        "cycle_second_stair_count": nothing(SMOOTH),
        "decay_step_size": nothing("nothing follows the cycle"),
        "decay_lr_rate": nothing("nothing follows the cycle"),
        "cycle_momentum": nothing(CONSTANT),
        **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"), nothing(CONSTANT)),
    },
    "cosineannealinglr": {"T_max": fact("T_max"), "eta_min": _kept("min_lr")},
    "polynomiallr": {"total_iters": fact("total_iters"), "power": _kept("power")},
    "linearlr": {
        "start_factor": _kept("start_factor"),
        "end_factor": _kept("end_factor"),
        "total_iters": fact("total_iters"),
    },
}
"""Type in small letters -> the rules for its parameters."""


def cycle_rules(kind: str) -> dict[str, Rule]:
    """The rules for the parameters of a schedule."""
    rules = {f"{PARAMS}{key}": rule for key, rule in RULES.get(kind, {}).items()}
    return rules | {f"{PARAMS}verbose": lambda reading, value, origin: None} if rules else {}


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
    fall, why = reading.facts.get("cycle's fall", (rise, where))
    check_count(fall, why)
    reading.set(WARMUP, rise, where)
    _length(reading, rise + fall, where if where == why else f"{where}; {why}")
    least, said = reading.facts["cycle's least rate"]
    reading.fact("min_lr", least, said)
    if least:
        reading.notes.append(f"{said}: warm-up starts at 0 in a recipe, not at this rate")
    if not any(": scheduler.params.cycle_momentum=" in origin for origin in reading.seen):
        reading.give_up(f"{default}: {PARAMS}cycle_momentum=True, from 0.9 to 0.8 and back", CONSTANT)
    return reading.facts["cycle's peak"]


def _line(reading: Reading, kind: str, default: str) -> None:
    """A rate that falls as a line; other powers, and lines that rise, have no counterpart."""
    if kind == "polynomiallr":
        power, where = reading.facts.get("power", (1.0, default))
        if power != 1:
            reading.give_up(where, "the rate falls linearly")
        reading.set("training.lr_schedule.final", 0.0, default)
        return
    start, where = reading.facts.get("start_factor", (1 / 3, default))
    end, why = reading.facts.get("end_factor", (1.0, default))
    if start == 1 and 0 <= end < 1:
        reading.set("training.lr_schedule.final", end, why)
    else:
        origin = "; ".join(dict.fromkeys((where, why)))
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
    steps = reading.settings.get(STEPS, (None, ""))[0]
    if steps is None:
        reading.set(STEPS, length, origin)
    elif steps != length:
        reading.give_up(
            origin, f"the schedule ends after {length} steps; a recipe's ends at the last step of the run, {steps}"
        )


def name_of(values: Mapping[str, Any]) -> str:
    """The type of the schedule of a DeepSpeed file in small letters."""
    section = values.get("scheduler")
    return str(section.get("type") or "").lower() if isinstance(section, Mapping) else ""
