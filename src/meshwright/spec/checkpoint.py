"""Checkpoint settings: when a run is saved and which checkpoints are kept."""

from pydantic import Field

from meshwright.spec.base import Spec


class CheckpointSpec(Spec):
    """When and how to save, and which checkpoints to keep. The last step is always saved."""

    every: int = Field(default=0, ge=0)
    """Save every this many steps; 0 means only after the last step."""
    asynchronous: bool = True
    """Training waits only while the state is copied to host memory; a thread writes it while training continues. Needs
    host memory for the state that this rank writes. false: training waits until the checkpoint is on disk."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep checkpoints whose step is a multiple of this; 0 means none."""
    keep_best: int = Field(default=0, ge=0)
    """Also keep this many checkpoints with the lowest held-out loss, among those saved right after an evaluation."""
    start_from: str | None = None
    """Run directory or checkpoint whose weights a new run starts from, relative to the recipe. Only the weights are
    loaded; optimizer, schedule and data start fresh."""
