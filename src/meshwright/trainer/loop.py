"""The training loop, whole: what happens in a run, in order."""

from dataclasses import asdict
from pathlib import Path

from meshwright.data.loader import Loader, evaluation_batches
from meshwright.data.mixture import held_out_samples, mean_context, training_samples
from meshwright.data.prepare import Corpus
from meshwright.plan.flops import flops_per_token
from meshwright.trainer.agreement import any_rank
from meshwright.trainer.device import peak_memory_bytes, synchronise
from meshwright.trainer.display import Display, short
from meshwright.trainer.evaluate import Evaluation, evaluate
from meshwright.trainer.metrics import Journal, StepClock, StepRecord
from meshwright.trainer.saver import Saver
from meshwright.trainer.setup import Trainer


def train_loop(trainer: Trainer, corpus: Corpus, journal: Journal | None, display: Display, run_dir: Path) -> None:
    """Train from `trainer.step` to the last step: step, measure, evaluate, save. Collective.

    `journal` is None on every rank but the first.
    """
    resolved, training = trainer.resolved, trainer.resolved.run.training
    clock = StepClock(
        ranks=trainer.worker.world_size,
        flops_per_token=flops_per_token(resolved.model, round(mean_context(corpus, resolved.run.data))),
        peak_flops=trainer.peak[0],
        steps=training.steps,
    )
    saver = Saver(trainer, run_dir / "checkpoints", journal, display)
    with build_loader(trainer, corpus) as loader:
        while trainer.step < training.steps:
            clock.begin()
            trainer.step += 1
            result = trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1))
            synchronise(trainer.device)
            clock.end()

            trainer.tokens += resolved.tokens_per_step
            trainer.skipped += result.skipped
            record = StepRecord(
                step=trainer.step,
                loss=result.loss,
                gnorm=result.gnorm,
                lr=training.optimizer.lr * trainer.train_step.lr_factor(trainer.step),
                tokens=trainer.tokens,
                mem=peak_memory_bytes(trainer.device),
                skipped=trainer.skipped,
                **clock.rates(step=trainer.step, tokens=resolved.tokens_per_step, trained=result.trained),
            )
            if journal:
                journal.write("step", **asdict(record))
            display.step(record)

            last = trainer.step == training.steps
            if corpus.held_out and training.evaluation.batches and due(trainer.step, training.evaluation.every, last):
                found = evaluate_held_out(trainer, corpus)
                saver.held_out_loss = trainer.step, found.loss
                report(found, trainer.step, journal, display)
            (writing,) = any_rank(saver.busy)
            if not writing:
                saver.settle()
            if due(trainer.step, resolved.run.checkpoint.every, last=False) and not last:
                saver.save()
    saver.finish()


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens `every` so many steps, and after the last, happens now."""
    return last or (every > 0 and step % every == 0)


def build_loader(trainer: Trainer, corpus: Corpus) -> Loader:
    """This rank's batches of training samples."""
    resolved = trainer.resolved
    return Loader(
        training_samples(corpus, resolved.run.data),
        seed=resolved.run.training.seed,
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        rank=trainer.data_rank,
        world_size=resolved.run.layout.data_parallel,
        places=trainer.places,
    )


def evaluate_held_out(trainer: Trainer, corpus: Corpus) -> Evaluation:
    """Loss on `evaluation.batches` global batches of held-out text, evenly spaced and always the same; collective."""
    resolved = trainer.resolved
    batches = evaluation_batches(
        held_out_samples(corpus, resolved.run.data),
        micro_batch=resolved.micro_batch,
        rank=trainer.data_rank,
        world_size=resolved.run.layout.data_parallel,
        places=trainer.places,
        num_samples=resolved.run.training.evaluation.batches * resolved.global_batch,
    )
    return evaluate(trainer.train_step.passes, batches, trainer.device, repeats_loss=trainer.train_step.repeats_loss)


def report(evaluation: Evaluation, step: int, journal: Journal | None, display: Display) -> None:
    """Print and write an evaluation."""
    display.say(
        f"step {step}  held-out loss {evaluation.loss:.3f}  perplexity {evaluation.perplexity:.2f}  "
        f"({short(evaluation.tokens)} tokens)"
    )
    if journal:
        journal.write("evaluation", step=step, perplexity=evaluation.perplexity, **asdict(evaluation))
