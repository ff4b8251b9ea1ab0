"""`Fact`: what a file states that becomes a setting only together with other keys; and the facts of several systems."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun


@dataclass(frozen=True, eq=False)
class Fact:
    """Something that files state, that no setting says alone. Two facts with the same words are different."""

    what: str
    """In words, for error messages and pages."""
    check: Callable[[Any, str], None] | None = None
    """Raises `UserError` for a value (of an origin) that it cannot have."""
    of: Callable[[ResolvedRun], Any] | None = None
    """Its value in a run, for files that are written; none where no file is written that states it."""


def check_count(value: Any, origin: str) -> None:
    """Raise `UserError` if a value is not a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**53:
        raise UserError(f"{origin}: must be a whole number, at least 1")


def check_number(value: Any, origin: str) -> None:
    """Raise `UserError` if a value is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**53:
        raise UserError(f"{origin}: must be a number")


def _check_stage(value: Any, origin: str) -> None:
    if value not in (0, 1, 2, 3):
        raise UserError(f"{origin}: a ZeRO stage must be 0, 1, 2 or 3")


def _floor(resolved: ResolvedRun) -> float:
    """Without the last digits of a product of decimal fractions."""
    training = resolved.run.training
    return float(f"{training.optimizer.lr * training.lr_schedule.final:.12g}")


RANKS = Fact("ranks", check_count)
NODES = Fact("nodes", check_count)
RANKS_OF_A_NODE = Fact("ranks of a node", check_count)
REPLICAS = Fact("data-parallel ranks", check_count, lambda resolved: resolved.run.layout.data_parallel)
SHARD = Fact("ranks among which state is sharded", check_count)
REPLICATE = Fact("copies of the sharded state", check_count)
ZERO = Fact("ZeRO stage", _check_stage, lambda resolved: resolved.run.layout.zero_stage)
RESHARDS = Fact("whether weights are sharded again after use", of=lambda resolved: resolved.run.layout.zero_stage != 2)
PIPELINE = Fact("schedule of the pipeline", of=lambda resolved: resolved.run.layout.schedule)
ACCUMULATION = Fact("microbatches of a step on one rank", check_count, lambda resolved: resolved.accumulation)
ACCUMULATION_OF_ALL = Fact("microbatches of a step on all ranks", check_count)
EPOCHS = Fact("epochs", check_number)
SAMPLES = Fact("samples of the run", check_number)
BETA1 = Fact("AdamW's first beta", check_number, lambda resolved: resolved.run.training.optimizer.betas[0])
BETA2 = Fact("AdamW's second beta", check_number, lambda resolved: resolved.run.training.optimizer.betas[1])
UNDECAYED = Fact("whether norms and biases are not decayed")
WARMUP_RATIO = Fact("warm-up as a share of all steps", check_number)
MIN_LR = Fact("least learning rate", check_number, _floor)
DECAY_STEPS = Fact("step at which the decay of the rate ends", check_number,
                   lambda resolved: resolved.run.training.steps)  # fmt: skip
