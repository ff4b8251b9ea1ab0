"""Rewind: a run returns to its last good checkpoint and skips the data that it went wrong on."""

from meshwright.checkpoint.verify import newest_good_checkpoint
from meshwright.trainer.saver import Saver
from meshwright.trainer.state import restore
from meshwright.trainer.step import NonFiniteError, StepResult


def rewind(saver: Saver, result: StepResult) -> None:
    """Restore the newest good checkpoint and pass over the batches between it and this step, this one's included.

    As Chowdhery et al. did by hand ("PaLM", 2022, section 5.1): loss spikes came from certain data meeting a certain
    state of the weights, and did not return when the same data were met later. Collective.

    Raises `NonFiniteError` where the run went back `guards.max_rewinds` times already, or has nothing to go back to.
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
        raise NonFiniteError(f"{what}, and there is no checkpoint to go back to; lower checkpoint.every")
    trainer.train_step.abandon()
    restore(trainer, checkpoint)
    trainer.passed_over = passed_over + step - trainer.step
    trainer.rewinds = rewinds
    batches = "batch" if step - trainer.step == 1 else f"{step - trainer.step} batches"
    saver.went_back(f"{what}: back to {checkpoint.name}, passing over the {batches} since (rewind {rewinds} of {most})")
