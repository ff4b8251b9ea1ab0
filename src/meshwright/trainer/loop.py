"""The training loop, whole: what happens in a run, in order."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from meshwright.data.loader import Loader, Microbatch, evaluation_batches, padding_of
from meshwright.data.mixture import held_out_samples, mean_context, training_samples
from meshwright.data.packing import Samples
from meshwright.data.prepare import Corpus
from meshwright.plan.flops import flops_per_token
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.agreement import largest
from meshwright.trainer.device import peak_memory_bytes, synchronise
from meshwright.trainer.display import Display, short
from meshwright.trainer.evaluate import Evaluation, evaluate, joined
from meshwright.trainer.launch import watch_store
from meshwright.trainer.metrics import Journal, StepClock, StepRecord
from meshwright.trainer.replicas import check_replicas
from meshwright.trainer.rewind import rewind
from meshwright.trainer.samples import samples_due, write_samples
from meshwright.trainer.saver import Saver
from meshwright.trainer.setup import Trainer
from meshwright.trainer.signals import StopRequest
from meshwright.trainer.step import StepResult
from meshwright.trainer.watchdog import Watchdog


def train_loop(
    trainer: Trainer, corpus: Corpus, journal: Journal | None, display: Display, run_dir: Path, stop: StopRequest
) -> int:
    """Train from `trainer.step` to the last step: agree, step, measure, evaluate, save. Collective.

    `journal` is None on every rank but the first. Returns the signal that ended it early, on whichever rank it arrived,
    or 0; the step that it ended at is saved either way.
    """
    resolved, training, guards = trainer.resolved, trainer.resolved.run.training, trainer.resolved.run.guards
    clock = StepClock(
        ranks=trainer.worker.world_size,
        flops_per_token=_flops_per_token(resolved, corpus),
        peak_flops=trainer.peak[0],
        steps=training.steps,
    )
    saver = Saver(trainer, run_dir / "checkpoints", journal, display)
    with build_loader(trainer, corpus) as loader, _watchdog(trainer) as watchdog:
        if trainer.step == 0:
            _write_due_samples(trainer, corpus, journal, display, watchdog)
        while True:
            signal, writing = largest(stop.number, saver.busy)
            if not writing:
                saver.settle()
            if signal or trainer.step >= training.steps:
                break
            watchdog.enter("step", trainer.step + 1)
            clock.begin()
            trainer.step += 1
            result = trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1 + trainer.passed_over))
            synchronise(trainer.device)
            clock.end()

            record = count_and_measure(trainer, clock, result)
            if journal:
                journal.write("step", **asdict(record))
            display.step(record)
            if result.rewind:
                rewind(saver, result)
                continue

            if due(trainer.step, guards.replicas_every):
                check_replicas(trainer.parameters)
            last = trainer.step == training.steps
            if (
                corpus.held_out
                and training.evaluation.batches
                and (last or due(trainer.step, training.evaluation.every))
            ):
                watchdog.enter("evaluation")
                found = evaluate_held_out(trainer, corpus, stop)
                if found:
                    saver.held_out_loss = trainer.step, found.loss
                    report(found, trainer.step, journal, display)
            _write_due_samples(trainer, corpus, journal, display, watchdog)
            if not last and due(trainer.step, resolved.run.checkpoint.every):
                watchdog.enter("saving", patient=True)
                saver.save()
        watchdog.enter("saving", patient=True)
        saver.finish(patient=not signal)
    return signal


def _write_due_samples(
    trainer: Trainer, corpus: Corpus, journal: Journal | None, display: Display, watchdog: Watchdog
) -> None:
    if samples_due(trainer):
        watchdog.enter("samples")
        write_samples(trainer, corpus, journal, display)


def _flops_per_token(resolved: ResolvedRun, corpus: Corpus) -> int:
    length = round(mean_context(corpus, resolved.run.data))
    return flops_per_token(resolved.model, length, resolved.run.finetune)


def _watchdog(trainer: Trainer) -> Watchdog:
    worker = trainer.worker
    return Watchdog(trainer.resolved.run.guards, worker.rank, worker.world_size, watch_store(worker))


def count_and_measure(trainer: Trainer, clock: StepClock, result: StepResult) -> StepRecord:
    """Add a step to the trainer's counts; what there is to write and show about it."""
    trainer.tokens += result.tokens
    trainer.skipped += result.skipped
    trainer.spikes += result.spike
    return StepRecord(
        step=trainer.step,
        loss=result.loss,
        gnorm=result.gnorm if trainer.train_step.passes.has_gradient else None,
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
    """Whether something that happens `every` so many steps, or never where that is 0, happens now."""
    return every > 0 and step % every == 0


def build_loader(trainer: Trainer, corpus: Corpus) -> Loader:
    """This rank's batches of training samples."""
    samples = training_samples(corpus, trainer.resolved.run.data)
    return Loader.of_run(samples, trainer.resolved, trainer.data_rank, trainer.places)


def evaluate_held_out(trainer: Trainer, corpus: Corpus, stop: StopRequest) -> Evaluation | None:
    """Loss on `evaluation.batches` global batches of held-out text, evenly spaced and always the same; of several
    sources each by itself, on as many batches as its share of the samples makes, one at least.

    None where a signal cut it short. Collective.
    """
    resolved = trainer.resolved
    parts = {}
    held_out = held_out_samples(corpus, resolved.run.data)
    names = [stream.name for stream in corpus.streams if stream.held_out]
    for name, samples in zip(names, held_out.streams, strict=True):
        batches = -(-resolved.run.training.evaluation.batches * len(samples) // len(held_out))
        found = _evaluate(trainer, samples, batches * resolved.global_batch, stop)
        if found is None:
            return None
        parts[name] = found
    return joined(parts)


def _evaluate(trainer: Trainer, samples: Samples, num_samples: int, stop: StopRequest) -> Evaluation | None:
    """Loss on so many of the samples, evenly spaced; None where a signal cut it short."""
    batches = evaluation_batches(
        samples,
        micro_batch=trainer.resolved.micro_batch,
        rank=trainer.data_rank,
        world_size=trainer.resolved.run.layout.data_parallel,
        places=trainer.places,
        num_samples=num_samples,
        padding=padding_of(trainer.resolved),
    )
    signal = 0

    def until_stopped() -> Iterator[Microbatch]:
        nonlocal signal
        for batch in batches:
            yield batch
            (signal,) = largest(stop.number)
            if signal:
                return

    found = evaluate(
        trainer.train_step.passes, until_stopped(), trainer.device, repeats_loss=trainer.train_step.repeats_loss
    )
    return None if signal else found


def report(evaluation: Evaluation, step: int, journal: Journal | None, display: Display) -> None:
    """Print and write an evaluation."""
    if evaluation.accuracy is None:
        told = f"perplexity {evaluation.perplexity:.2f}  ({short(evaluation.tokens)} tokens)"
    else:
        told = f"accuracy {100 * evaluation.accuracy:.1f} %  margin {evaluation.margin:.3f}"
        told += f"  ({short(evaluation.tokens)} pairs)"
    sources = "".join(f"  {name} {part.loss:.3f}" for name, part in evaluation.sources.items())
    display.say(f"step {step}  held-out loss {evaluation.loss:.3f}{sources}  {told}")
    if journal:
        fields = {key: value for key, value in asdict(evaluation).items() if key != "sources" and value is not None}
        for name, part in evaluation.sources.items():
            fields[f"loss/{name}"] = part.loss
        journal.write("evaluation", step=step, perplexity=evaluation.perplexity, **fields)
