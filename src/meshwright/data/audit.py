"""The audit: reads every batch of every rank of a planned run; trusts only the token files and the recipe.

Samples are identified by their tokens, not by the loader's numbering. Every row of a rank is compared with the tokens
of its sample's pieces, which the audit reads itself, and the pieces are compared with the boundaries of documents.
Shapes: T positions of a sample.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise, product

import numpy as np

from meshwright.data.audit_records import trained_text_problems
from meshwright.data.loader import HostBatch, Loader
from meshwright.data.mixture import JoinedSamples, Mixture
from meshwright.data.packing import NO_LABEL, Sample, Samples, blank_sample
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.spec.data import DataSpec

EXAMPLES = 3
"""Findings of one kind that are reported in full; the rest are only counted."""
ATTENTION_ROWS = 16
"""Rows whose attention is checked in full, T x T."""

CHECKS = {
    "packing": "every token of a stream is a label exactly once, except the first token of each document",
    "rows": "every row holds its sample's tokens, its labels are the next tokens, and masked positions have no label",
    "documents": "documents are separated exactly where the recipe requires it",
    "attention": "a token attends to all earlier tokens of its document, and to no others",
    "order": "every rank gets the samples that the data order assigns to it",
    "ranks": "no two ranks see the same sample in one epoch",
    "epochs": "all samples of a stream are seen equally often, as often as planned",
    "mixture": "every stream has its share of the tokens",
    "answers": "in records, the trained tokens are the assistant's text, turn by turn",
    "held out": "every held-out token is evaluated once, and no training document is held out",
}
"""The claim that each check proves."""


@dataclass(kw_only=True)
class PlannedRun:
    """The input of an audit: every part of the data path between the recipe and the ranks."""

    corpus: Corpus
    data: DataSpec
    mixture: Mixture
    """The samples of each stream, and the sample at each position."""
    held_out: JoinedSamples | None
    seed: int
    steps: int
    global_batch: int
    world_size: int
    """Ranks that read different data."""
    batches: Callable[[int], Loader]
    """The loader of each data-parallel rank; closed by the caller."""
    epochs: Sequence[float]
    """The announced number of epochs of each stream."""
    sees: Callable[[np.ndarray], np.ndarray] | None = None
    """The model's attention mask: documents [b, T] to bool [b, T, T]; None leaves its check out."""


@dataclass
class AuditReport:
    """The findings of an audit."""

    findings: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in CHECKS})
    counts: Counter[str] = field(default_factory=Counter)
    """Number of findings of each check."""
    samples: int = 0
    """Samples read."""
    tokens: int = 0
    """Labels read."""
    duplicates: int = 0
    """Training documents whose exact copy is held out."""

    def add(self, check: str, message: str) -> None:
        """Record a finding."""
        self.counts[check] += 1
        if self.counts[check] <= EXAMPLES:
            self.findings[check].append(message)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.counts


def audit(run: PlannedRun, progress: Callable[[str, int, int], None] | None = None) -> AuditReport:
    """Read the whole run and prove it, or report its faults."""
    report = AuditReport()
    for stream, samples in zip(run.corpus.streams, run.mixture.streams, strict=True):
        for problem in packing_problems(stream.train, samples, run.data, keep_tail=False):
            report.add("packing", f"{stream.name}: {problem}")
    for stream in run.corpus.streams:
        if stream.train.trained is not None and any(file.is_records for file in stream.files):
            for problem in trained_text_problems(stream, run.corpus.tokenizer, run.data):
                report.add("answers", f"{stream.name}: {problem}")
    _Reading(run, report).read(progress or (lambda what, done, total: None))
    _check_held_out(run, report)
    return report


def packing_problems(file: TokenFile, samples: Samples, data: DataSpec, *, keep_tail: bool) -> Iterator[str]:
    """Faults in the pieces of all samples together."""
    pieces = np.array([piece for i in range(len(samples)) for piece in samples.pieces(i)], np.int64).reshape(-1, 2)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    begins, ends = pieces[:, 0], pieces.sum(1)
    overlap = np.flatnonzero(begins[1:] < ends[:-1])
    if len(overlap):
        yield f"{len(overlap)} pieces overlap, first at token {begins[overlap[0] + 1]}"
    starts = file.starts()
    if data.packing == "concatenated":
        gaps = np.flatnonzero(begins[1:] > ends[:-1])
        lost, allowed = len(file.tokens) - 1 - int(ends[-1]), 0 if keep_tail else data.sequence_length - 1
        if begins[0] != 0 or len(gaps):
            yield f"{len(gaps) + bool(begins[0])} gaps, first at token {0 if begins[0] else ends[gaps[0]]}"
        if lost > allowed:
            yield f"{lost} tokens at the end are in no sample; an incomplete last sample has at most {allowed}"
        return
    owners = np.searchsorted(starts, begins, side="right") - 1
    if (ends >= starts[owners + 1]).any():
        yield f"{int((ends >= starts[owners + 1]).sum())} pieces extend past the end of their document"
    labels = np.bincount(owners, pieces[:, 1], minlength=file.num_documents)
    missing = np.flatnonzero(labels != np.maximum(np.diff(starts) - 1, 0))
    if len(missing):
        yield f"{len(missing)} documents are not completely in samples, first document {missing[0]}"
    count = np.bincount(owners, minlength=file.num_documents)
    split = np.flatnonzero(count > np.maximum(1, -(-(np.diff(starts) - 1) // data.sequence_length)))
    if len(split):
        yield f"{len(split)} documents are split into more pieces than necessary, first document {split[0]}"


def expected_sample(file: TokenFile, samples: Samples, index: int, data: DataSpec) -> Sample:
    """Sample `index` according to the recipe, read from the tokens."""
    inputs_T, documents_T = np.zeros((2, data.sequence_length), np.int64)
    labels_T = np.full(data.sequence_length, NO_LABEL, np.int64)
    place = 0
    for start, length in samples.pieces(index):
        inputs_T[place : place + length] = file.tokens[start : start + length]
        labels_T[place : place + length] = file.tokens[start + 1 : start + length + 1]
        if file.trained is not None:
            only_read = np.flatnonzero(file.trained[start + 1 : start + length + 1] == 0)
            labels_T[place + only_read] = NO_LABEL
        place += length
        if data.separate_documents:
            shift, document = place - length - start, file.document_at(start)
            while (border := file.start(document + 1)) <= start + length:
                labels_T[border - 1 + shift] = NO_LABEL
                documents_T[border + shift :] += border < start + length
                document += 1
            documents_T[place:] = documents_T[place - 1] + 1
    return Sample(inputs_T, labels_T, documents_T if data.separate_documents else None)


class _Reading:
    """One pass over all batches."""

    def __init__(self, run: PlannedRun, report: AuditReport):
        self.run, self.report = run, report
        self.seen = [np.zeros(len(samples), np.int32) for samples in run.mixture.streams]
        self.last = [np.full((len(samples), 2), -1, np.int32) for samples in run.mixture.streams]
        """The epoch and the rank of each sample's last occurrence."""
        self.samples, self.tokens = [0] * len(self.seen), [0] * len(self.seen)
        self.attention_left = ATTENTION_ROWS if run.sees else 0
        self._by_content: dict[bytes, tuple[int, int]] | None = None

    def read(self, progress: Callable[[str, int, int], None]) -> None:
        """Every row of every rank and step."""
        run = self.run
        ranks = [run.batches(rank) for rank in range(run.world_size)]
        for step in range(run.steps):
            position = step * run.global_batch
            for rank, batches in enumerate(ranks):
                for sample in self._rows(batches.microbatches(step), position):
                    where = f"step {step + 1}, rank {rank}, position {position}"
                    self._row(sample, position, rank, where)
                    position += 1
            wanted = (step + 1) * run.global_batch
            if position != wanted:
                self.report.add("order", f"step {step + 1} holds {position - wanted + run.global_batch} samples")
            progress("auditing", step + 1, run.steps)
        self._check_counts()

    def _rows(self, microbatches: Sequence[HostBatch], position: int) -> Iterator[Sample]:
        """The rows of a rank's step, the first at this position. Without padding, rows are joined into one; each must
        have the length of the sample that the order assigns to its position."""
        rows = self.run.global_batch // self.run.world_size // len(microbatches)
        for batch in microbatches:
            assert batch.labels is not None
            ends = [batch.tokens.shape[1]]
            if self.run.data.packing == "padded" and len(batch.tokens) < rows:
                wanted = (self.run.mixture.locate(place, self.run.seed) for place in range(position, position + rows))
                ends = np.cumsum([_used(self._expected(*place).labels) for place in wanted]).tolist()
                for check, problem in joint_problems(batch, ends):
                    self.report.add(check, f"rows of positions {position} to {position + rows - 1}: {problem}")
                if batch.tokens.shape[1] < ends[-1]:
                    continue
            for row, (start, stop) in product(range(len(batch.tokens)), pairwise([0, *ends])):
                apart = None if batch.document_ids is None else batch.document_ids[row, start:stop]
                yield Sample(batch.tokens[row, start:stop], batch.labels[row, start:stop], apart)
            position += rows

    def _row(self, row: Sample, position: int, rank: int, where: str) -> None:
        row = self._without_tail(row)
        wanted = stream, index = self.run.mixture.locate(position, self.run.seed)
        expected = self._expected(stream, index)
        if not np.array_equal(row.inputs, expected.inputs):
            match = self._recognise(row)
            if match is None:
                self.report.add("rows", f"{where}: its tokens match no sample of any stream")
                return
            stream, index = match
            expected = self._expected(stream, index)
            self.report.add("order", f"{where}: {self._name(stream, index)} instead of {self._name(*wanted)}")
        epoch, last_rank = self.samples[stream] // len(self.seen[stream]), int(self.last[stream][index, 1])
        if self.last[stream][index, 0] == epoch and last_rank != rank:
            self.report.add("ranks", f"{where}: {self._name(stream, index)}, which rank {last_rank} has also seen")
        self.last[stream][index] = epoch, rank
        self.seen[stream][index] += 1
        self.samples[stream] += 1
        self.tokens[stream] += sum(piece.length for piece in self.run.mixture.streams[stream].pieces(index))
        self.report.samples += 1
        self.report.tokens += int(np.count_nonzero(row.labels != NO_LABEL))
        for problem in label_problems(row, expected):
            self.report.add("rows", f"{where}: {problem}")
        for problem in document_problems(row, expected):
            self.report.add("documents", f"{where}: {problem}")
        if self.attention_left and self.run.sees and expected.documents is not None:
            self.attention_left -= 1
            for problem in attention_problems(self.run.sees, row, expected.documents):
                self.report.add("attention", f"{where}: {problem}")

    def _expected(self, stream: int, index: int) -> Sample:
        file, samples = self.run.corpus.streams[stream].train, self.run.mixture.streams[stream]
        return self._without_tail(expected_sample(file, samples, index, self.run.data))

    def _without_tail(self, row: Sample) -> Sample:
        """The row with blanks after its last label, if rows are padded: a rank may omit those tokens."""
        if self.run.data.packing != "padded":
            return row
        used, blank = _used(row.labels), blank_sample(self.run.data.sequence_length)
        blank.inputs[:used], blank.labels[:used] = row.inputs[:used], row.labels[:used]
        if row.documents is None:
            return blank
        documents = np.full_like(blank.inputs, row.documents[used - 1])
        documents[:used] = row.documents[:used]
        return blank._replace(documents=documents)

    def _name(self, stream: int, index: int) -> str:
        return f"sample {index} of {self.run.corpus.streams[stream].name}"

    def _recognise(self, row: Sample) -> tuple[int, int] | None:
        """The sample with these inputs; reads all samples once, on the first call."""
        if self._by_content is None:
            self._by_content = {
                _digest(self._expected(stream, index).inputs): (stream, index)
                for stream, samples in enumerate(self.run.mixture.streams)
                for index in range(len(samples))
            }
        return self._by_content.get(_digest(row.inputs))

    def _check_counts(self) -> None:
        """Check epochs and shares of the samples seen."""
        run, total, wanted = self.run, sum(self.samples), _shares(self.run)
        for stream, (seen, count) in enumerate(zip(self.seen, self.samples, strict=True)):
            name = run.corpus.streams[stream].name
            often, rest = divmod(count, len(seen))
            odd = np.flatnonzero((seen < often) | (seen > often + bool(rest)))
            for index in odd:
                self.report.add(
                    "epochs",
                    f"{name}: sample {index} is seen {seen[index]} times instead of {often}"
                    + (f" or {often + 1}" if rest else ""),
                )
            if abs(run.epochs[stream] - count / len(seen)) > 1e-6:
                self.report.add(
                    "epochs", f"{name}: seen {count / len(seen):.3f} times, {run.epochs[stream]:.3f} planned"
                )
            if abs(count - total * wanted[stream]) >= len(self.seen):
                share = self.tokens[stream] / max(1, sum(self.tokens))
                self.report.add(
                    "mixture",
                    f"{name}: {100 * share:.3f} % of the tokens in {count} samples; the recipe requires about "
                    f"{float(total * wanted[stream]):.1f} samples",
                )


def joint_problems(batch: HostBatch, ends: Sequence[int]) -> Iterator[tuple[str, str]]:
    """(check, fault) of a row that joins several rows ending at `ends`."""
    assert batch.labels is not None
    borders = np.array(ends[:-1])
    if (batch.labels[0, ends[-1] :] != NO_LABEL).any() or batch.labels.shape[1] < ends[-1]:
        yield "rows", "the joined row has more labels or fewer tokens than its rows"
    elif batch.document_ids is None or not (np.diff(batch.document_ids[0])[borders - 1]).all():
        yield "documents", "attention crosses the boundary between rows"


def label_problems(row: Sample, expected: Sample) -> Iterator[str]:
    """Faults in the labels of a row whose inputs are right."""
    if np.array_equal(row.labels, expected.labels):
        return
    here, there = row.labels != NO_LABEL, expected.labels != NO_LABEL
    if not (here & there).any():
        yield "no label is at a correct position: the mask is inverted"
    elif np.array_equal(row.labels[here], row.inputs[here]):
        yield "the labels are the inputs themselves, not the next tokens"
    elif np.array_equal(here[:-1], there[:-1]) and np.array_equal(row.labels[:-1], expected.labels[1:]):
        yield "the labels are shifted by two tokens, not one"
    elif (here != there).any():
        yield f"{int((here & ~there).sum())} extra labels, {int((there & ~here).sum())} missing"
    else:
        wrong = np.flatnonzero(row.labels != expected.labels)
        yield f"{len(wrong)} labels are not the next tokens of their inputs, first at position {wrong[0]}"


def document_problems(row: Sample, expected: Sample) -> Iterator[str]:
    """Faults in the documents of a row."""
    if expected.documents is None:
        if row.documents is not None and len(np.unique(row.documents)) > 1:
            yield "documents are separated, although data.separate_documents is false"
        return
    documents = np.zeros_like(row.inputs) if row.documents is None else row.documents
    wanted, borders = np.diff(expected.documents) != 0, np.diff(documents) != 0
    if (wanted & ~borders).any():
        yield f"attention crosses {int((wanted & ~borders).sum())} document boundaries, first at position " + str(
            int(np.flatnonzero(wanted & ~borders)[0]) + 1
        )
    if (borders & ~wanted).any():
        yield f"documents are cut at {int((borders & ~wanted).sum())} positions that are not boundaries"


def attention_problems(sees: Callable[[np.ndarray], np.ndarray], row: Sample, documents_T: np.ndarray) -> Iterator[str]:
    """Faults in the attention of a row."""
    given = np.zeros_like(row.inputs) if row.documents is None else row.documents
    sees_TT = sees(given[None])[0]
    places = np.arange(len(documents_T))
    wanted_TT = (places[:, None] >= places) & (documents_T[:, None] == documents_T)
    for what, wrong_TT in (
        ("attends to a later token", sees_TT & (places[:, None] < places)),
        ("attends to another document", sees_TT & (documents_T[:, None] != documents_T)),
        ("does not attend to an earlier token of its document", wanted_TT & ~sees_TT),
    ):
        if wrong_TT.any():
            query, key = np.argwhere(wrong_TT)[0]
            yield f"{int(wrong_TT.sum())} times a token {what}, first at position {query} (position {key})"


def _check_held_out(run: PlannedRun, report: AuditReport) -> None:
    if run.held_out is None:
        return
    for (number, samples), file in zip(enumerate(run.held_out.streams), run.corpus.held_out, strict=True):
        for problem in packing_problems(file, samples, run.data, keep_tail=True):
            report.add("held out", f"held-out stream {number}: {problem}")
    held_out = {digest for file in run.corpus.held_out for digest in _document_digests(file)}
    for stream in run.corpus.streams:
        for document, digest in enumerate(_document_digests(stream.train)):
            if digest in held_out:
                report.duplicates += 1
                report.add("held out", f"{stream.name}: an exact copy of training document {document} is held out")


def _shares(run: PlannedRun) -> list[Fraction]:
    """The required share of each stream in all samples, from the recipe's weights and the streams' sizes."""
    wanted = []
    for stream, samples in zip(run.corpus.streams, run.mixture.streams, strict=True):
        weight = Fraction(samples.num_tokens) if stream.weight is None else Fraction(str(stream.weight))
        wanted.append(weight * len(samples) / samples.num_tokens)
    return [share / sum(wanted) for share in wanted]


def _document_digests(file: TokenFile) -> Iterator[bytes]:
    starts = file.starts()
    for document in range(file.num_documents):
        tokens = np.asarray(file.tokens[starts[document] : starts[document + 1]])
        yield _digest(tokens.astype(np.int64))


def _digest(tokens: np.ndarray) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _used(labels_T: np.ndarray) -> int:
    """Positions up to the last label, at least one."""
    return int(np.flatnonzero(labels_T != NO_LABEL)[-1]) + 1 if (labels_T != NO_LABEL).any() else 1
