"""The training loop: the events of a run, in order."""

from dataclasses import asdict

from meshwright.checkpoint.verify import newest_good_checkpoint
from meshwright.data.loader import Loader
from meshwright.data.mixture import mean_context, training_samples
from meshwright.data.prepare import Corpus
from meshwright.devices import synchronize
from meshwright.families.flops import flops_per_token
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.device import peak_memory_bytes
from meshwright.trainer.metrics import StepClock, StepRecord
from meshwright.trainer.saver import Saver
from meshwright.trainer.session import Session
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import restore
from meshwright.trainer.step import NonFiniteError, StepResult


def train_loop(session: Session) -> int:
    """Train from the trainer's step to the last: agree, evaluate, save, step, call the callbacks. Collective.

    Returns the signal that ended the loop early, received by any rank, or 0. The last step is saved in both cases.
    """
    trainer, corpus, watchdog = session.trainer, session.corpus, session.watchdog
    training, save_every = session.run.training, session.run.checkpoint.every
    clock = StepClock(
        ranks=trainer.worker.world_size,
        flops_per_token=_flops_per_token(trainer.resolved, corpus),
        peak_flops=trainer.peak[0],
        steps=training.steps,
    )
    saver = Saver(session)
    evaluates = bool(corpus.held_out and training.evaluation.batches)
    evaluated = saved = trainer.step  # the steps of the last evaluation and the last save
    with build_loader(trainer, corpus) as loader, watchdog:
        session.loader = loader
        session.notify("on_start")
        while True:
            signal, writing = session.agree(writing=saver.busy)
            if not writing:
                saver.settle()
            if signal:
                break
            step = trainer.step
            last = bool(session.reason) or step >= training.steps
            due_to_evaluate = evaluates and evaluated != step and (last or due(step, training.evaluation.every))
            if due_to_evaluate or session.evaluation_asked:
                evaluated = step
                session.evaluate()
            elif saved != step and not last and (session.save_asked or due(step, save_every)):
                saved = step
                watchdog.enter("saving", patient=True)
                saver.save()
            elif last:
                break
            else:
                session.begin_step()
                clock.begin()
                batches = loader.microbatches(trainer.step - 1 + trainer.passed_over)
                clock.loaded()
                result = trainer.train_step(trainer.step, batches)
                synchronize(trainer.device)
                clock.end()
                if slow := trainer.store.complaint():
                    session.say(f"warning: {slow}")
                record = session.log("step", **asdict(count_and_measure(trainer, clock, result)))
                if result.rewind:
                    _rewind(saver, result)
                    evaluated = saved = trainer.step
                else:
                    session.notify("on_step", record)
        watchdog.enter("saving", patient=True)
        saver.finish(patient=not signal)
        reason = {"why": session.reason} if session.reason else {}
        session.notify("on_stop", session.log("stopped" if signal else "end", **reason))
    return signal


def _rewind(saver: Saver, result: StepResult) -> None:
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


def _flops_per_token(resolved: ResolvedRun, corpus: Corpus) -> int:
    length = round(mean_context(corpus, resolved.run.data))
    return flops_per_token(resolved.model, length, resolved.run.finetune)


def count_and_measure(trainer: Trainer, clock: StepClock, result: StepResult) -> StepRecord:
    """Add a step to the trainer's counts, and return its record."""
    trainer.tokens += result.tokens
    trainer.skipped += result.skipped
    trainer.spikes += result.spike
    return StepRecord(
        step=trainer.step,
        loss=result.loss,
        gnorm=result.gnorm,
        lr=trainer.resolved.run.training.optimizer.lr * trainer.train_step.lr_factor(trainer.step),
        tokens=trainer.tokens,
        mem=peak_memory_bytes(trainer.device),
        skipped=trainer.skipped,
        spikes=trainer.spikes,
        rewinds=trainer.rewinds,
        expert_load=result.expert_load,
        **clock.rates(step=trainer.step, tokens=result.tokens, trained=result.trained),
    )


def due(step: int, every: int) -> bool:
    """Whether an event with interval `every` is due at this step; 0 means never."""
    return every > 0 and step % every == 0


def build_loader(trainer: Trainer, corpus: Corpus) -> Loader:
    """This rank's batches of training samples."""
    samples = training_samples(corpus, trainer.resolved.run.data)
    return Loader.of_run(samples, trainer.resolved, trainer.data_rank, trainer.places)
