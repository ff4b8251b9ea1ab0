"""The evaluation of a run in progress: its held-out samples, and its record."""

from collections.abc import Iterator
from typing import Any

from meshwright.data.loader import HostBatch, Share, evaluation_batches
from meshwright.data.mixture import held_out_samples
from meshwright.data.packing import Samples
from meshwright.data.prepare import Corpus
from meshwright.launch.signals import StopRequest
from meshwright.trainer.agreement import largest
from meshwright.trainer.display import short
from meshwright.trainer.evaluate import Evaluation, evaluate, joined
from meshwright.trainer.setup import Trainer


def evaluate_held_out(trainer: Trainer, corpus: Corpus, stop: StopRequest) -> Evaluation | None:
    """Loss on `evaluation.batches` global batches of held-out text, evenly spaced and always the same. With several
    sources, each is measured separately on its share of the batches, at least one.

    None if a signal interrupted it. Collective.
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
    """Loss on `num_samples` of the samples, evenly spaced; None if a signal interrupted it."""
    share = Share.of_run(trainer.resolved, trainer.data_rank, trainer.places)
    batches = evaluation_batches(samples, share, micro_batch=trainer.resolved.micro_batch, num_samples=num_samples)
    signal = 0

    def until_stopped() -> Iterator[HostBatch]:
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


def evaluation_fields(evaluation: Evaluation) -> dict[str, Any]:
    """The fields of a record of kind `evaluation`: the figures, and each source's loss as `loss/NAME`."""
    fields = {"loss": evaluation.loss, "tokens": evaluation.tokens, **evaluation.metrics}
    sources = {f"loss/{name}": part.loss for name, part in evaluation.sources.items()}
    return {"perplexity": evaluation.perplexity, **fields, **sources}


def evaluation_line(evaluation: Evaluation, step: int) -> str:
    """`step 200  held-out loss 2.341  perplexity 10.39  (33.2k tokens)`."""
    measured = {name: f"{value:.3f}" for name, value in evaluation.metrics.items()}
    measured = measured or {"perplexity": f"{evaluation.perplexity:.2f}"}
    told = "  ".join(f"{name} {value}" for name, value in measured.items())
    sources = "".join(f"  {name} {part.loss:.3f}" for name, part in evaluation.sources.items())
    counted = f"({short(evaluation.tokens)} {evaluation.term}s)"
    return f"step {step}  held-out loss {evaluation.loss:.3f}{sources}  {told}  {counted}"
