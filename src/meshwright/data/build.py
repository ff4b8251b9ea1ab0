"""Tokenization of a corpus's files, resumable after a kill.

The folder of an unfinished corpus holds its token files and a journal. The journal starts with the split; every further
line is a commit: a position in the corpus and the lengths of the token files up to there, all of it on disk. To resume,
the files are truncated at the last commit and reading continues from its position.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.encoders import Encoders, num_cores
from meshwright.data.examples import Encoder, RecordEncoder
from meshwright.data.readers import UNDECODABLE, Document, read_all, read_documents
from meshwright.data.sources import SourceFile, names_of, total_bytes
from meshwright.data.split import Census, Split, likely_split, plan_split, text_hash
from meshwright.data.token_file import LENGTHS, Mark, TokenWriter
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably
from meshwright.storage.sync import sync_file

TRAIN, HELD_OUT = "train.bin", "held_out.bin"
"""Files in a corpus's folder; without held-out text there is no second file."""
JOURNAL = "journal.jsonl"
"""File in the folder of an unfinished corpus."""
COMMIT_SECONDS = 2.0
"""Interval between commits: the work that a kill may lose."""
CHUNK = 1 << 19
"""Characters encoded together by one process; each takes about 100 bytes of memory."""
SMALL = 1 << 23
"""Bytes of a corpus that is read once before tokenizing, to choose its split. A larger corpus is tokenized with a
likely split, and again if one side is then empty."""
ALONE = 1 << 23
"""A corpus of at most this many bytes is tokenized in this process, faster than others would start."""
Progress = Callable[[str, int, int], None]
"""Called with (task, bytes of the corpus done, bytes of the corpus)."""


class BuildProgress(NamedTuple):
    """Progress of a tokenization."""

    file: int = 0
    """Number of the file."""
    record: int = 0
    """Completed records of this file."""
    pieces: int = 0
    """Completed pieces of the next record."""
    num_bytes: int = 0
    """Bytes of all completed files."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One line of the journal."""

    place: BuildProgress = field(default_factory=BuildProgress)
    census: Census = field(default_factory=Census)
    train: Mark = field(default_factory=Mark)
    held_out: Mark = field(default_factory=Mark)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    where: str
    """The id of its record."""
    text: str
    held_out: bool
    ends_document: bool
    counts: tuple[int, int, str] | None = None
    """Characters, hash and note of the record that ends here."""
    skipped: str = ""
    """The reason why it has no text."""
    place: BuildProgress
    """The progress after this piece."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """The tokenization of a corpus: its files and how they are encoded and split."""

    files: Sequence[SourceFile]
    held_out: float
    """Share of the text that is held out."""
    tokenizer: TextTokenizer
    encoder: Encoder
    """Encodes text or records."""
    progress: Progress
    split: Split | None = None
    """None: chosen from the corpus."""
    processes: int | None = None
    """Encoding processes; None: one per core, none for a small corpus. The token files do not depend on it."""

    def write(self, directory: Path) -> None:
        """Write the token files into `directory`, or resume writing them.

        Raises UserError for invalid text or records, and if one side of the split would be empty.
        """
        begun_split, commit = _read_journal(directory)
        small = total_bytes(self.files) <= SMALL
        split = begun_split or self.split or choose_split(self.files, self.held_out, self.progress, small=small)
        _write_journal(directory, split, commit)
        while True:
            if split.single_cut is not None and self._records:
                raise UserError(
                    f"{self.files[0].name} has only one record, too few to hold one out; set data.held_out=0"
                )
            census = self._write_after(commit or Commit(), directory, split)
            if census.suits(split):
                return
            split, commit = choose_split(self.files, self.held_out, self.progress, small=True), None
            _write_journal(directory, split, commit)

    @property
    def _records(self) -> bool:
        return isinstance(self.encoder, RecordEncoder)

    def _write_after(self, commit: Commit, directory: Path, split: Split) -> Census:
        """Tokenize everything after `commit`; returns the census of the whole corpus."""
        total, records = total_bytes(self.files), self._records
        processes = self.processes
        if processes is None:
            processes = num_cores() if total > ALONE else 0
        with ExitStack() as stack:

            def writer_of(name: str, mark: Mark) -> TokenWriter:
                return stack.enter_context(TokenWriter(directory / name, self.tokenizer, mark=mark, masked=records))

            train = writer_of(TRAIN, commit.train)
            held_out = writer_of(HELD_OUT, commit.held_out) if split.holds_out else None
            journal = stack.enter_context((directory / JOURNAL).open("a"))
            encoders = stack.enter_context(Encoders(self.encoder, processes))
            census, place, last_commit = commit.census, commit.place, time.monotonic()

            def commit_now() -> None:
                marks = {"train": train.sync(), "held_out": held_out.sync() if held_out else Mark()}
                journal.write(json.dumps({"place": place, "census": asdict(census), **marks}) + "\n")
                sync_file(journal)

            cut = (lambda text: [text]) if records else self.tokenizer.pieces
            for pieces, encoded in encoders.map(_chunks(_pieces(self.files, split, cut, place))):
                for piece, result in zip(pieces, encoded, strict=True):
                    writer = held_out if piece.held_out and held_out else train
                    if result.error:
                        raise UserError(f"{piece.where}: {result.error}")
                    for ids in result.documents:
                        if records:
                            writer.write_document(ids)
                        else:
                            writer.write(ids)
                    if piece.ends_document and not records:
                        writer.end_document()
                    if piece.counts:
                        census.add(*piece.counts, result.note)
                    census.note(piece.skipped)
                place = pieces[-1].place
                if time.monotonic() - last_commit >= COMMIT_SECONDS:
                    commit_now()
                    last_commit = time.monotonic()
                self.progress("tokenizing", place.num_bytes, total)
            train.finish(census.notes)
            if held_out:
                held_out.finish()
            return census


def remove_scaffolding(directory: Path) -> None:
    """Delete the journal and other files that only resuming needs, after the corpus is complete."""
    for path in (directory / JOURNAL, *directory.glob(f"*{LENGTHS}")):
        path.unlink(missing_ok=True)


def choose_split(files: Sequence[SourceFile], held_out: float, progress: Progress, *, small: bool) -> Split:
    """The split of a small corpus, after reading it, or the likely one of a large corpus."""
    beginning = [document for _, document in zip(range(2), read_documents(files), strict=False)]
    if small or len(beginning) < 2:
        return plan_split(counted("reading", files, progress), held_out, where=names_of(files))[0]
    return likely_split(held_out)


def counted(what: str, files: Sequence[SourceFile], progress: Progress) -> Iterator[Document]:
    """The documents of the files, with progress reported."""
    done, total = 0, total_bytes(files)
    for document in read_documents(files):
        yield document
        done += document.num_bytes
        progress(what, done, total)


def _pieces(
    files: Sequence[SourceFile], split: Split, cut_text: Callable[[str], list[str]], place: BuildProgress
) -> Iterator[_Piece]:
    """The pieces of all documents after `place`, in order."""
    done, skip_pieces, num_bytes = place.record, place.pieces, place.num_bytes
    for index in range(place.file, len(files)):
        for document in read_all([files[index]], skip=done):
            if document.note == UNDECODABLE:
                num_bytes += document.num_bytes
                yield _skipped(document, BuildProgress(index, document.record, 0, num_bytes))
                continue
            value = text_hash(document.text)
            cut = [
                (held_out, text, number == len(texts) - 1)
                for held_out, part in split.parts(document.text, value)
                for texts in [cut_text(part)]
                for number, text in enumerate(texts)
            ]
            for number, (held_out, text, ends) in enumerate(cut[skip_pieces:], start=skip_pieces + 1):
                last = number == len(cut)
                after = BuildProgress(index, document.record - 1, number, num_bytes)
                if last:
                    num_bytes += document.num_bytes
                    after = BuildProgress(index, document.record, 0, num_bytes)
                yield _Piece(
                    where=document.id,
                    text=text,
                    held_out=held_out,
                    ends_document=ends,
                    counts=(len(document.text), value, document.note) if last else None,
                    place=after,
                )
            skip_pieces = 0
        done = 0


def _skipped(document: Document, place: BuildProgress) -> _Piece:
    """What stands for a document that is not UTF-8: it is counted."""
    return _Piece(where=document.id, text="", held_out=False, ends_document=False, skipped=document.note, place=place)


def _chunks(pieces: Iterator[_Piece]) -> Iterator[tuple[list[_Piece], list[str]]]:
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK:
            yield chunk, [piece.text for piece in chunk]
            chunk, size = [], 0
    if chunk:
        yield chunk, [piece.text for piece in chunk]


def _write_journal(directory: Path, split: Split, commit: Commit | None) -> None:
    """Write a journal that contains only the last commit."""
    lines = [asdict(split), *([asdict(commit)] if commit else [])]
    write_durably(directory / JOURNAL, "".join(json.dumps(line) + "\n" for line in lines))


def _read_journal(directory: Path) -> tuple[Split | None, Commit | None]:
    """The split and the last commit, if there are any; an incomplete last line is ignored."""
    if not (directory / JOURNAL).is_file():
        return None, None
    lines: list[dict[str, Any]] = []
    for line in (directory / JOURNAL).read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    if not lines:
        return None, None
    split, commits = Split(**lines[0]), lines[1:]
    if not commits:
        return split, None
    last = commits[-1]
    commit = Commit(
        place=BuildProgress(*last["place"]),
        census=Census(**last["census"]),
        train=Mark(*last["train"]),
        held_out=Mark(*last["held_out"]),
    )
    return split, commit
