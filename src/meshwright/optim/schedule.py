"""The one place for learning-rate schedules: a pure function of the step."""

import math

from meshwright.spec.training import LrScheduleSpec


def lr_factor(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    """Factor of the peak learning rate for optimizer step `step` (the first is 1) of `steps`.

    Warm-up ends with factor 1 at its last step; cosine and linear reach `final` at the last step. wsd (Hu et al.,
    "MiniCPM", 2024) stays at 1 and falls linearly to `final` over its last `decay` steps.
    """
    warmup = schedule.warmup_steps(steps)
    if step < warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    decay_from = warmup
    if schedule.name == "wsd":
        decay_from = max(decay_from, steps - (schedule.decay or max(1, steps // 5)))
    progress = (step - decay_from) / max(1, steps - decay_from)
    progress = min(max(progress, 0.0), 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.final + (1 - schedule.final) * share
