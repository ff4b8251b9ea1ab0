"""Learning-rate schedules: pure functions of the step."""

import math
from collections.abc import Callable
from numbers import Real

from meshwright.spec.errors import UserError
from meshwright.spec.plugins import check_takes, load_plugin
from meshwright.spec.training import LrScheduleSpec, ScheduleName

Shape = Callable[[LrScheduleSpec, int, int], float]
"""(settings, step from the end of warm-up on, all steps) -> factor of the peak learning rate."""


def lr_factor(schedule: LrScheduleSpec, step: int, steps: int, shape: Shape | None = None) -> float:
    """Factor of the peak learning rate for optimizer step `step` (the first is 1) of `steps`.

    Warm-up ends with factor 1 at its last step; then the factor is `shape`, by default `find_shape(schedule)`. cosine,
    linear and one_cycle reach `final` at the last step; wsd (Hu et al., "MiniCPM", 2024) stays at 1 and falls linearly
    to `final` over its last `decay` steps.
    """
    warmup = schedule.warmup_steps(steps)
    if step >= warmup:
        return (shape or find_shape(schedule))(schedule, step, steps)
    if schedule.name == "one_cycle":
        return 1 - (1 - schedule.initial) * _cosine_share(_progress(step, 1, warmup))
    return step / warmup


def find_shape(schedule: LrScheduleSpec) -> Shape:
    """The shape named `schedule.name`: a row of `SHAPES`, or a plug-in, a function of (step, steps) and its options.

    Raises `UserError` if it does not exist or takes other arguments.
    """
    where = f"training.lr_schedule.name={schedule.name}"
    if schedule.name in SHAPES:
        return SHAPES[schedule.name]
    function = load_plugin("lr_schedules", schedule.name)
    check_takes(function, where, "step", "steps", **schedule.options)

    def shape(schedule: LrScheduleSpec, step: int, steps: int) -> float:
        factor = function(step, steps, **schedule.options)
        if not (isinstance(factor, Real) and 0 <= float(factor) < math.inf):
            raise UserError(f"{where}: returns {factor!r} for step {step}, but the factor must be a number, at least 0")
        return float(factor)

    return shape


def _progress(step: int, begin: int, end: int) -> float:
    """Progress from `begin` to `end`, in [0, 1]."""
    return min(max((step - begin) / max(1, end - begin), 0.0), 1.0)


def _fallen(schedule: LrScheduleSpec, share: float) -> float:
    """Between 1 (`share` 1) and `final` (`share` 0)."""
    return schedule.final + (1 - schedule.final) * share


def _constant(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    return 1.0


def _linear(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    return _fallen(schedule, 1 - _progress(step, schedule.warmup_steps(steps), steps))


def _cosine_share(progress: float) -> float:
    """Half a cosine: 1 at the beginning, 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _cosine(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    return _fallen(schedule, _cosine_share(_progress(step, schedule.warmup_steps(steps), steps)))


def _wsd(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    begin = max(schedule.warmup_steps(steps), steps - schedule.decay_steps(steps))
    return _fallen(schedule, 1 - _progress(step, begin, steps))


SHAPES: dict[ScheduleName, Shape] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "one_cycle": _cosine,  # after its own warm-up
}
"""Values of `training.lr_schedule.name` that ship."""
