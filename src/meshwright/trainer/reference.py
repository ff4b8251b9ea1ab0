"""The one place that finds what the reference of preference tuning makes of every pair of answers.

The reference is the model as training starts, and it never changes. So one pass over the pairs before the first step is
all that is needed of it: one number a pair, kept in the run directory, and no second model in memory, whatever the
layout. Adapters add nothing at the start, so with them it is the base model with its adapters switched off.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright.data.loader import evaluation_batches, padding_of
from meshwright.data.packing import PairSamples, build_samples
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.parallel.data import release_gathered
from meshwright.trainer.setup import Trainer
from meshwright.trainer.step import preference_of, to_device

REFERENCE = "reference.npz"
"""Name in a run directory: the reference's margins of every pair of each stream, to train on and held out."""


def with_references(trainer: Trainer, corpus: Corpus, run_dir: Path) -> Corpus:
    """The corpus with what the reference makes of its pairs: found before the first step, then read. Collective.

    Raises `ValueError` where a run that goes on does not find it, or has other pairs than it began with.
    """
    preference, path = trainer.resolved.run.training.preference, run_dir / REFERENCE
    if preference is None or preference.reference == "none":
        return corpus
    files = {f"train.{number}": stream.train for number, stream in enumerate(corpus.streams)}
    files |= {f"held_out.{number}": stream.held_out for number, stream in enumerate(corpus.streams) if stream.held_out}
    if trainer.step:
        tables = _read(path, files)
    else:
        tables = {name: _margins(trainer, file) for name, file in files.items()}
        if trainer.worker.rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            prints = {f"{name}.fingerprint": np.array(file.fingerprint) for name, file in files.items()}
            np.savez(path, **tables, **prints)  # pyright: ignore[reportArgumentType]
    known = {name: replace(file, references=tables[name]) for name, file in files.items()}
    streams = (
        replace(stream, train=known[f"train.{number}"], held_out=known.get(f"held_out.{number}"))
        for number, stream in enumerate(corpus.streams)
    )
    return replace(corpus, streams=tuple(streams))


def _read(path: Path, files: Mapping[str, TokenFile]) -> dict[str, np.ndarray]:
    gone = "and the model that was the reference has learnt since"
    if not path.is_file():
        raise ValueError(f"{path}: what the reference makes of the pairs is missing, {gone}")
    with np.load(path) as found:
        tables = dict(found)
    for name, file in files.items():
        if name not in tables or tables.get(f"{name}.fingerprint", file.fingerprint) != file.fingerprint:
            raise ValueError(
                f"{path}: data.sources hold other pairs than those that the reference has judged, {gone}; give the "
                "pairs of then, or begin a new run with others (from these weights: checkpoint.start_from; from these "
                "adapters: finetune.start_from)"
            )
    return tables


def _margins(trainer: Trainer, file: TokenFile) -> np.ndarray:
    """The model's margin for each pair of a file, float64 (num_pairs,)."""
    resolved, passes = trainer.resolved, trainer.train_step.passes
    samples, preference = build_samples(file, resolved.run.data), preference_of(passes.model)
    assert isinstance(samples, PairSamples)
    assert preference is not None
    micro_batch, ranks = resolved.micro_batch, resolved.run.layout.data_parallel
    batches = evaluation_batches(
        samples,
        micro_batch=micro_batch,
        rank=trainer.data_rank,
        world_size=ranks,
        places=trainer.places,
        padding=padding_of(resolved),
    )
    preference.seen = []
    passes.losses(to_device(batch, trainer.device) for batch in batches)
    release_gathered(passes.model)
    seen, preference.seen = preference.seen, None
    table = torch.zeros(samples.num_pairs, dtype=torch.float64)
    if preference.counts and not trainer.train_step.repeats_loss:
        for number, margins_BP in enumerate(seen):
            first = (number * ranks + trainer.data_rank) * micro_batch
            for index, margins_P in enumerate(margins_BP.cpu(), start=first):
                if index < len(samples):
                    pairs = samples.pairs[index]
                    table[torch.from_numpy(pairs)] = margins_P[: len(pairs)]
    table = table.to(trainer.device)
    if dist.is_initialized():
        dist.all_reduce(table)
    return table.cpu().numpy()
