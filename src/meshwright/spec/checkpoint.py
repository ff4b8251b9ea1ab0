"""The one place that says when a run is saved and what is kept."""

from pydantic import Field

from meshwright.spec.base import Spec


class CheckpointSpec(Spec):
    """When to save. The last step is always saved."""

    every: int = Field(default=0, ge=0)
    """Save every this many steps; 0 means only after the last step."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
