"""Check of data reading: every rank's microbatches against the samples of the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.comm.objects import gather_everywhere
from meshwright.data.loader import HostBatch, Loader, padding_of
from meshwright.prove.reference import samples_for
from meshwright.trainer.setup import Trainer


@dataclass(frozen=True)
class Reading:
    """The samples that one rank read in a step."""

    rows: tuple[int | None, ...]
    """The sample of the step in each row; None for a row that is not a sample."""
    places: tuple[int, ...]
    """The positions in each sample whose tokens the rank has."""
    other: str = ""
    """The difference from the sample other than the tokens."""


@dataclass(frozen=True)
class Misread:
    """Samples that some ranks wrongly read or failed to read."""

    what: str
    ranks: tuple[int, ...]


def check_readings(trainer: Trainer, microbatches: Sequence[HostBatch], step: int) -> Misread | None:
    """None if all ranks together read every sample of a step as often as the layout requires. Collective."""
    resolved, layout = trainer.resolved, trainer.resolved.run.layout
    if padding_of(resolved) == "left_out":
        return None  # rows are joined
    size = resolved.global_batch
    with Loader(samples_for(trainer), seed=resolved.run.training.seed, global_batch=size, micro_batch=size) as loader:
        (whole,) = loader.microbatches(step - 1)
    readings = gather_everywhere(_read(trainer, microbatches, whole))
    sharers = layout.world_size // layout.data_parallel
    return _apart(readings, layout.cp * layout.tp) or _judge(readings, size, resolved.run.data.sequence_length, sharers)


def _read(trainer: Trainer, microbatches: Sequence[HostBatch], whole: HostBatch) -> Reading:
    everywhere = np.arange(whole.tokens.shape[1])
    places = everywhere if trainer.places is None else trainer.places
    rows: list[int | None] = []
    other = ""
    for microbatch in microbatches:
        here = places[: microbatch.tokens.shape[1]]  # padding may have been cut
        samples = {row.tobytes(): index for index, row in enumerate(whole.tokens[:, here])}
        found = [samples.get(np.ascontiguousarray(row).tobytes()) for row in microbatch.tokens]
        for row, sample in enumerate(found):
            if sample is not None and not other:
                other = _differs(microbatch, row, whole, sample, here)
        rows += found
    return Reading(tuple(rows), tuple(places.tolist()), other)


def _differs(microbatch: HostBatch, row: int, whole: HostBatch, sample: int, places: np.ndarray) -> str:
    assert microbatch.labels is not None
    assert whole.labels is not None
    if not np.array_equal(microbatch.labels[row], whole.labels[sample, places]):
        return f"the labels of sample {sample}"
    if microbatch.document_ids is not None and whole.document_ids is not None:
        length = microbatch.document_ids.shape[1]
        if not np.array_equal(microbatch.document_ids[row], whole.document_ids[sample, :length]):
            return f"the documents of sample {sample}"
    return ""


def _apart(readings: Sequence[Reading], together: int) -> Misread | None:
    """Checks that `together` neighbouring ranks, which split one model or sequence, read the same samples."""
    for rank, reading in enumerate(readings):
        first = rank // together * together
        if reading.rows != readings[first].rows:
            row = next(row for row, (a, b) in enumerate(zip(reading.rows, readings[first].rows, strict=True)) if a != b)
            theirs = f"rank {first}, which shares its samples, read sample {readings[first].rows[row]}"
            return Misread(f"rank {rank} read sample {reading.rows[row]} of the step, but {theirs}", (rank,))
    return None


def _judge(readings: Sequence[Reading], size: int, length: int, sharers: int) -> Misread | None:
    """Checks ranks among which `sharers` share each sample, by splitting its tokens or the model."""
    for rank, reading in enumerate(readings):
        if None in reading.rows:
            return Misread(f"rank {rank} read a sample that is not in the step", (rank,))
    for sample in range(size):
        ranks = tuple(rank for rank, reading in enumerate(readings) for row in reading.rows if row == sample)
        if len(ranks) != sharers:
            readers = "no rank" if not ranks else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            what = f"sample {sample} of the step was read by {readers}, but {sharers} should have read it"
            return Misread(what, ranks)
        counts = np.zeros(length, dtype=int)
        for rank in ranks:
            np.add.at(counts, list(readings[rank].places), 1)
        if counts.min() != counts.max():
            place = int(counts.argmin())
            return Misread(f"position {place} of sample {sample} was read by fewer ranks than other positions", ranks)
    for rank, reading in enumerate(readings):
        if reading.other:
            return Misread(f"{reading.other} on rank {rank} differ from the step's", (rank,))
    return None
