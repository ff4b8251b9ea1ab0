"""A model measured on held-out data: the objective's loss and metrics; in a run, on its held-out samples."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.comm import collectives
from meshwright.comm.objects import largest
from meshwright.data.loader import BatchShare, HostBatch, evaluation_batches
from meshwright.data.mixture import held_out_samples
from meshwright.data.packing import Samples
from meshwright.data.prepare import Corpus
from meshwright.devices import widest
from meshwright.launch.signals import StopRequest
from meshwright.models.batch import TensorBatch, to_device
from meshwright.parallel import Passes
from meshwright.parallel.data import release_gathered
from meshwright.spec.errors import UserError
from meshwright.trainer.display import short
from meshwright.trainer.setup import Trainer


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out data; equal on every rank, and for every number of ranks."""

    loss: float
    """Mean loss per term: nats per token, or an objective's own."""
    tokens: int
    """Number of terms: tokens that carry loss, or pairs of answers."""
    term: str = "token"
    """Name of a term."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, each a mean over terms (`Objective.metrics`)."""
    sources: dict[str, "Evaluation"] = field(default_factory=dict)
    """The same for each source of data, if there are several."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def joined(parts: dict[str, Evaluation]) -> Evaluation:
    """The evaluation over several sources; all terms have the same weight."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    tokens = sum(part.tokens for part in parts.values())
    loss = sum(part.loss * part.tokens for part in parts.values()) / tokens
    names = next(iter(parts.values())).metrics
    metrics = {name: sum(part.metrics[name] * part.tokens for part in parts.values()) / tokens for name in names}
    term = next(iter(parts.values())).term
    return Evaluation(loss=loss, tokens=tokens, term=term, metrics=metrics, sources=parts)


def evaluate(
    passes: Passes, microbatches: Iterable[HostBatch], device: torch.device, *, repeats_loss: bool = False
) -> Evaluation:
    """Means over the terms of `microbatches` of all ranks; every rank must have the same number of them. Collective.

    `repeats_loss`: another rank has and counts the same microbatches.
    """
    terms = 0

    def batches() -> Iterator[TensorBatch]:
        nonlocal terms
        for microbatch in microbatches:
            terms += passes.count(microbatch)
            yield to_device(microbatch, device)

    loss, metrics = passes.evaluate(batches())
    sums = loss, *metrics.values(), torch.tensor(terms, dtype=torch.float64)
    totals = torch.stack([part.to(device, widest(device)) for part in sums])
    release_gathered(passes.model)
    if repeats_loss:
        totals.zero_()
    *totals_of, number = collectives.all_reduce_(totals).tolist()
    if not number:
        raise UserError("evaluation: there are no held-out tokens; raise data.held_out or set evaluation.batches=0")
    mean_loss, *means = (total / number for total in totals_of)
    means_of = dict(zip(metrics, means, strict=True))
    return Evaluation(loss=mean_loss, tokens=int(number), term=passes.objective.term, metrics=means_of)


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
        evaluation = _evaluate(trainer, samples, batches * resolved.global_batch, stop)
        if evaluation is None:
            return None
        parts[name] = evaluation
    return joined(parts)


def _evaluate(trainer: Trainer, samples: Samples, num_samples: int, stop: StopRequest) -> Evaluation | None:
    """Loss on `num_samples` of the samples, evenly spaced; None if a signal interrupted it."""
    share = BatchShare.of_run(trainer.resolved, trainer.data_rank, trainer.places)
    batches = evaluation_batches(samples, share, micro_batch=trainer.resolved.micro_batch, num_samples=num_samples)
    signal = 0

    def until_stopped() -> Iterator[HostBatch]:
        nonlocal signal
        for batch in batches:
            yield batch
            (signal,) = largest(stop.number)
            if signal:
                return

    evaluation = evaluate(
        trainer.train_step.passes, until_stopped(), trainer.device, repeats_loss=trainer.train_step.repeats_loss
    )
    return None if signal else evaluation


def evaluation_fields(evaluation: Evaluation) -> dict[str, Any]:
    """The fields of a record of kind `evaluation`: the figures, and each source's loss as `loss/NAME`."""
    fields = {"loss": evaluation.loss, "tokens": evaluation.tokens, **evaluation.metrics}
    sources = {f"loss/{name}": part.loss for name, part in evaluation.sources.items()}
    return {"perplexity": evaluation.perplexity, **fields, **sources}


def evaluation_line(evaluation: Evaluation, step: int) -> str:
    """`step 200  held-out loss 2.341  perplexity 10.39  (33.2k tokens)`."""
    measured = {name: f"{value:.3f}" for name, value in evaluation.metrics.items()}
    measured = measured or {"perplexity": f"{evaluation.perplexity:.2f}"}
    figures = "  ".join(f"{name} {value}" for name, value in measured.items())
    sources = "".join(f"  {name} {part.loss:.3f}" for name, part in evaluation.sources.items())
    counted = f"({short(evaluation.tokens)} {evaluation.term}s)"
    return f"step {step}  held-out loss {evaluation.loss:.3f}{sources}  {figures}  {counted}"
