"""Rewind: a run returns to its last good checkpoint and skips the batches before the fault."""

from meshwright.checkpoint.verify import newest_good_checkpoint
from meshwright.trainer.saver import Saver
from meshwright.trainer.state import restore
from meshwright.trainer.step import NonFiniteError, StepResult


def rewind(saver: Saver, result: StepResult) -> None:
    """Restore the newest good checkpoint and skip the batches between it and this step, including this step's.

    Chowdhery et al. did this by hand ("PaLM", 2022, section 5.1): loss spikes came from particular data at a particular
    state of the weights, and the same data did no harm later. Collective.

    Raises `NonFiniteError` after `guards.max_rewinds` rewinds, or if there is no checkpoint.
    """
    trainer = saver.trainer
    step, passed_over, rewinds = trainer.step, trainer.passed_over, trainer.rewinds + 1
    what = f"step {step}: loss {result.loss:.4g}, gradient norm {result.gnorm or 0:.4g}"
    most = trainer.resolved.run.guards.max_rewinds
    if rewinds > most:
        raise NonFiniteError(f"{what}, after {most} rewinds (guards.max_rewinds); lower training.optimizer.lr")
    saver.wait()
    checkpoint, _ = newest_good_checkpoint(saver.root)
    if checkpoint is None:
        raise NonFiniteError(f"{what}, but there is no checkpoint to return to; lower checkpoint.every")
    trainer.train_step.abandon()
    restore(trainer, checkpoint)
    trainer.passed_over = passed_over + step - trainer.step
    trainer.rewinds = rewinds
    batches = "batch" if step - trainer.step == 1 else f"{step - trainer.step} batches"
    saver.went_back(
        f"{what}: back to {checkpoint.name}, skipping the {batches} since then (rewind {rewinds} of {most})"
    )
