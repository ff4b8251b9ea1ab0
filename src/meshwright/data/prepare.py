"""The one place that turns the sources of a recipe into a tokenizer and token files, once, in a cache."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.sources import Document, SourceFile, find_files, read_documents
from meshwright.data.split import Split, plan_split
from meshwright.data.token_file import TokenFile, TokenWriter, open_token_file
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from meshwright.spec.data import DataSpec

TRAIN, HELD_OUT, TOKENIZER = "train.bin", "held_out.bin", "tokenizer"
"""Names in a corpus's folder; it holds a tokenizer only where one was trained."""
CACHE_FORMAT = 1
"""Raised whenever the same corpus would give other files."""
TRAINING_CHARACTERS = 1 << 26
"""Characters a tokenizer is trained on at most: more changes its merges little and costs minutes."""
BLOCK = 1 << 12
"""Characters of a block, where a tokenizer is trained on a sample of the text."""
CHUNK = 1 << 22
"""Characters encoded at a time on all cores; about 100 bytes of memory each while they are."""

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes of the corpus done, bytes of the corpus)."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus ready to be trained on."""

    directory: Path
    """Folder in the cache that holds it."""
    tokenizer: TextTokenizer
    """The tokenizer that made its tokens."""
    train: TokenFile
    """Tokens to train on."""
    held_out: TokenFile | None
    """Tokens for evaluation; None where data.held_out is 0."""


def prepare_corpus(
    data: DataSpec, *, base_dir: Path, model_dir: Path | None = None, progress: Progress | None = None
) -> Corpus:
    """Tokenize the sources, or find the tokens in the cache.

    `base_dir` is the recipe's folder, to which sources and tokenizer are relative; `model_dir` is the
    model's Hugging Face directory, whose tokenizer `tokenizer: auto` takes. A tokenizer is trained on the
    training documents only, or where they are longer than TRAINING_CHARACTERS on blocks of them, evenly
    spaced.

    The cache knows a corpus by name, size and modification time of its files, by the tokenizer and by the
    share held out: one `stat` per file, so that starting a run never reads the corpus again. (A file changed
    without changing size and time goes unnoticed.) A corpus appears in the cache by one rename when it is
    complete; processes that build the same one at the same time do so apart, and the first wins.

    Raises ValueError for everything that is wrong with sources, tokenizer or cache.
    """
    files = find_files(data.sources, base_dir)
    tokenizer = find_tokenizer(data, base_dir=base_dir, model_dir=model_dir)
    about = {
        "format": CACHE_FORMAT,
        "files": [(file.name, file.text_key, *_size_and_time(file)) for file in files],
        "held_out": data.held_out,
        "tokenizer": tokenizer.fingerprint if tokenizer else f"train {data.tokenizer_vocab}",
    }
    fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    directory = Path(data.cache_dir) / fingerprint
    if not directory.is_dir():
        _build(directory, files, data, tokenizer, progress or (lambda what, done, total: None))
    tokenizer = tokenizer or load_tokenizer(directory / TOKENIZER)
    return Corpus(
        directory=directory,
        tokenizer=tokenizer,
        train=open_token_file(directory / TRAIN, tokenizer),
        held_out=open_token_file(directory / HELD_OUT, tokenizer) if data.held_out else None,
    )


def find_tokenizer(data: DataSpec, *, base_dir: Path, model_dir: Path | None = None) -> TextTokenizer | None:
    """The tokenizer that a recipe names; None when `auto` means that one is trained on the corpus."""
    if data.tokenizer != "auto":
        return load_tokenizer(base_dir / os.path.expanduser(data.tokenizer))
    return load_tokenizer(model_dir) if model_dir else None


def _build(
    directory: Path,
    files: Sequence[SourceFile],
    data: DataSpec,
    tokenizer: TextTokenizer | None,
    progress: Progress,
) -> None:
    split = plan_split(_counted("reading", files, progress), data.held_out)
    unfinished = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        if tokenizer is None:
            documents = _counted("training the tokenizer", files, progress)
            texts = (text for doc in documents for held_out, text in split.parts(doc) if not held_out)
            tokenizer = train_tokenizer(_sample(texts, split.num_characters), data.tokenizer_vocab)
            tokenizer.save(unfinished / TOKENIZER)
        _tokenize(_counted("tokenizing", files, progress), split, tokenizer, unfinished)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process was first
                raise
    except OSError as error:
        raise ValueError(f"data.cache_dir={data.cache_dir} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenize(documents: Iterable[Document], split: Split, tokenizer: TextTokenizer, directory: Path) -> None:
    with ExitStack() as stack:
        train = stack.enter_context(closing(TokenWriter(directory / TRAIN, tokenizer)))
        held_out = train
        if split.holds_out:
            held_out = stack.enter_context(closing(TokenWriter(directory / HELD_OUT, tokenizer)))
        for chunk in _chunks(_pieces(documents, split, tokenizer)):
            ids_of_pieces = tokenizer.encode_batch([piece.text for piece in chunk])
            for piece, ids in zip(chunk, ids_of_pieces, strict=True):
                writer = held_out if piece.held_out else train
                writer.write(ids)
                if piece.ends_document:
                    writer.end_document()


@dataclass(frozen=True)
class _Piece:
    text: str
    held_out: bool
    ends_document: bool


def _pieces(documents: Iterable[Document], split: Split, tokenizer: TextTokenizer) -> Iterator[_Piece]:
    for document in documents:
        for held_out, text in split.parts(document):
            *firsts, last = tokenizer.pieces(text)
            for first in firsts:
                yield _Piece(first, held_out, ends_document=False)
            yield _Piece(last, held_out, ends_document=True)


def _chunks(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _sample(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    """The texts; of more than TRAINING_CHARACTERS, evenly spaced blocks that make up about as many."""
    if num_characters <= TRAINING_CHARACTERS:
        yield from texts
        return
    share = TRAINING_CHARACTERS / num_characters
    seen = taken = 0
    for text in texts:
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            if taken <= share * seen:
                taken += len(block)
                yield block
            seen += len(block)


def _counted(what: str, files: Sequence[SourceFile], progress: Progress) -> Iterator[Document]:
    done, total = 0, sum(_size_and_time(file)[0] for file in files)
    for document in read_documents(files):
        yield document
        done += document.num_bytes
        progress(what, done, total)


def _size_and_time(file: SourceFile) -> tuple[int, int]:
    found = file.path.stat()
    return found.st_size, found.st_mtime_ns
