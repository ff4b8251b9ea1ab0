"""The reference of preference tuning: its margin for every pair of answers, computed before the first step.

The reference is the model at the start of training; it never changes. One pass over the pairs computes its margins, one
number per pair, and saves them in the run directory, so no second model is ever in memory. Adapters are zero at the
start, so with adapters the reference is the base model.
"""

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meshwright.comm import collectives
from meshwright.data.loader import BatchShare, evaluation_batches
from meshwright.data.packing import PairSamples, Samples, build_samples
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.models.batch import to_device
from meshwright.objectives.dpo import pair_margins
from meshwright.parallel.data import release_gathered
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably
from meshwright.trainer.setup import Trainer

REFERENCE = "reference.npz"
"""File in a run directory: the reference's margins of every pair of each stream, training and held-out."""


def with_references(trainer: Trainer, corpus: Corpus, run_dir: Path) -> Corpus:
    """The corpus with the reference's margins: computed before the first step, read on resume. Collective.

    Raises `UserError` if a resumed run does not find them, or has other pairs than at its start.
    """
    path = run_dir / REFERENCE
    if not trainer.train_step.passes.objective.needs_reference:
        return corpus
    files = {f"train.{number}": stream.train for number, stream in enumerate(corpus.streams)}
    files |= {f"held_out.{number}": stream.held_out for number, stream in enumerate(corpus.streams) if stream.held_out}
    if trainer.step:
        tables = _read(path, files)
    else:
        samples = {name: build_samples(file, trainer.resolved.run.data) for name, file in files.items()}
        tables = {
            name: margins_of(trainer, each, each.pairs)
            for name, each in samples.items()
            if isinstance(each, PairSamples)
        }
        if trainer.worker.rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            prints = {f"{name}.fingerprint": np.array(file.fingerprint) for name, file in files.items()}
            written = io.BytesIO()
            np.savez(written, **tables, **prints)  # pyright: ignore[reportArgumentType]
            write_durably(path, written.getvalue())
    known = {name: replace(file, references=tables[name]) for name, file in files.items()}
    streams = (
        replace(stream, train=known[f"train.{number}"], held_out=known.get(f"held_out.{number}"))
        for number, stream in enumerate(corpus.streams)
    )
    return replace(corpus, streams=tuple(streams))


def _read(path: Path, files: Mapping[str, TokenFile]) -> dict[str, np.ndarray]:
    gone = "and the reference model has since been trained"
    if not path.is_file():
        raise UserError(f"{path}: the reference's margins are missing, {gone}")
    try:
        with path.open("rb") as file, np.load(file) as archive:
            tables = dict(archive)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}), {gone}; start a new run from these weights") from error
    for name, file in files.items():
        if name not in tables or tables.get(f"{name}.fingerprint", file.fingerprint) != file.fingerprint:
            raise UserError(
                f"{path}: data.sources contain other pairs than at the start of the run, {gone}; restore the old "
                "pairs, or start a new run with the new ones (from these weights: checkpoint.start_from; from these "
                "adapters: finetune.start_from)"
            )
    return tables


def margins_of(trainer: Trainer, samples: Samples, pairs: Sequence[np.ndarray]) -> np.ndarray:
    """The model's margin for each pair, float64 (number of pairs,); `pairs`: the numbers of each sample's.

    Collective.
    """
    resolved, passes = trainer.resolved, trainer.train_step.passes
    micro_batch, ranks = resolved.micro_batch, resolved.run.layout.data_parallel
    share = BatchShare.of_run(resolved, trainer.data_rank, trainer.places)
    batches = evaluation_batches(samples, share, micro_batch=micro_batch)
    table = torch.zeros(sum(map(len, pairs)), dtype=torch.float64)
    margins = passes.read((to_device(batch, trainer.device) for batch in batches), pair_margins)
    for number, margins_BP in enumerate(margins):
        first = (number * ranks + trainer.data_rank) * micro_batch
        for index, margins_P in enumerate(margins_BP.cpu().double(), start=first):
            if index < len(samples):
                table[torch.from_numpy(pairs[index])] = margins_P[: len(pairs[index])]
    release_gathered(passes.model)
    if trainer.train_step.repeats_loss or not passes.counts:
        table.zero_()
    return collectives.all_reduce_(table.to(trainer.device)).cpu().numpy()
