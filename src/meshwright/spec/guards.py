"""Guards: faults that a run watches for, and its reactions."""

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Spec


class GuardSpec(Spec):
    """Faults that a run detects, in addition to non-finite steps (`training.non_finite`)."""

    spikes: Literal["off", "skip", "rewind"] = "off"
    """Reaction to a step whose loss or gradient norm is more than 6 standard deviations above its mean over the last
    128 steps: none, skip the update, or go back as with non_finite: rewind."""
    max_skipped: int = Field(default=10, ge=0)
    """Consecutive steps that may be skipped (non_finite: skip, spikes: skip) before the run ends with an error; 0 means
    no limit."""
    max_rewinds: int = Field(default=3, ge=0)
    """Number of times a run may go back to its last checkpoint before it ends with an error."""
    replicas_every: int = Field(default=0, ge=0)
    """Compare a hash of every replicated weight over the ranks every this many steps; 0 means never."""
    verify_every: int = Field(default=0, ge=0)
    """Every this many steps, one process recomputes a step from the same weights on the same data and compares loss,
    gradient norm and every updated parameter; 0 means never. It runs in parallel with training on rank 0's CPUs (the
    cost of three steps) and writes as many bytes as two checkpoints to run_dir."""
    on_difference: Literal["raise", "warn"] = "raise"
    """Reaction if verify_every finds a difference or cannot recompute the step: end with an error, or warn and
    continue."""
    stuck_after: float = Field(default=60, ge=0)
    """Seconds without progress after which a rank counts as hung. The limit is ten times the longest step so far if
    that is more, and thirty times this value for operations that happen for the first time (first steps, compilation).
    0: no limit."""
    arrive_within: float = Field(default=600, gt=0)
    """Seconds within which every rank must have started."""
    restarts: int = Field(default=3, ge=0)
    """Consecutive restarts of crashed workers by meshwright's launcher without a new checkpoint in between."""
