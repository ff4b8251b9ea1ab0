"""Retention: selects the old checkpoints to keep."""

import json
import math
import shutil
from pathlib import Path

from meshwright.checkpoint.manifest import TRAINER, UNFINISHED, list_checkpoints, remove_checkpoint, step_of
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.storage.durable import write_durably

BEST = "best"
HELD_OUT_LOSS = "held_out_loss"
"""Key of `trainer.json`: the loss measured right before the checkpoint was saved, or None."""


def prune(root: Path, spec: CheckpointSpec) -> None:
    """Name the best checkpoint in `best`, then remove checkpoints that `spec` does not keep, and unfinished saves."""
    published = list_checkpoints(root)
    kept = set(published[-spec.keep_last :])
    if spec.keep_every:
        kept |= {path for path in published if step_of(path) % spec.keep_every == 0}
    if spec.keep_best:
        ranked = sorted((loss, path) for path in published if (loss := held_out_loss(path)) is not None)
        if ranked:
            write_durably(root / BEST, ranked[0][1].name + "\n")
        kept |= {path for _, path in ranked[: spec.keep_best]}
    for path in published:
        if path not in kept:
            remove_checkpoint(path)
    for path in root.iterdir():
        if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path)


def held_out_loss(checkpoint: Path) -> float | None:
    """The held-out loss measured right before the checkpoint; None if there is none or it cannot be read."""
    try:
        loss = json.loads((checkpoint / TRAINER).read_text())[HELD_OUT_LOSS]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
