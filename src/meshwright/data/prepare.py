"""Preparation: converts a recipe's sources to a tokenizer and token streams, once, in a cache."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.build import HELD_OUT, TRAIN, Progress, Tokenization, counted
from meshwright.data.cache import cached, damage_of
from meshwright.data.checksums import ENDING, BlockChecksums, sums_of, write_sums
from meshwright.data.examples import RecordEncoder, TextEncoder, record_encoder
from meshwright.data.readers import told_apart
from meshwright.data.sources import SourceFile, find_files, names_of
from meshwright.data.split import Split, plan_split, text_hash
from meshwright.data.token_file import (
    TokenFile,
    check_places,
    looks_wider,
    open_indexed,
    open_token_file,
    scan_tokens,
    write_index,
)
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from meshwright.families.hub import cached_snapshot
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError

TOKENIZER, SCANNED = "tokenizer", "scanned"
"""Names in the cache's folders: the files of a trained tokenizer, and the scan of a given token file."""
TRAINING_CHARACTERS = 1 << 26
"""Most characters that a tokenizer is trained on: more would change its merges little and cost minutes."""
BLOCK = 1 << 12
"""Characters of a block, if a tokenizer is trained on a sample of the text."""


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Tokens read in one order: of one weighted source, or of all unweighted text together."""

    name: str
    """The source's path, or the common prefix of several."""
    train: TokenFile
    """Tokens to train on."""
    held_out: TokenFile | None
    """Tokens for evaluation; None if data.held_out is 0."""
    weight: float | None
    """The source's weight."""
    formats: tuple[str, ...] = ("text",)
    """The formats of its records; text or tokens."""
    files: tuple[SourceFile, ...] = ()
    """Its source files."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus ready to be trained on."""

    tokenizer: TextTokenizer
    """The tokenizer that made its tokens."""
    streams: tuple[TokenStream, ...]
    """At least one."""
    note: str = ""
    """A remark about what is not trained."""

    @property
    def held_out(self) -> tuple[TokenFile, ...]:
        """The held-out tokens of each stream; nothing if data.held_out is 0."""
        return tuple(stream.held_out for stream in self.streams if stream.held_out)

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return sum(len(stream.train.tokens) for stream in self.streams)

    @property
    def num_held_out(self) -> int:
        """Tokens held out."""
        return sum(len(file.tokens) for file in self.held_out)

    @property
    def num_documents(self) -> int:
        """Documents to train on."""
        return sum(stream.train.num_documents for stream in self.streams)

    def identity(self) -> list[dict[str, Any]]:
        """For each stream its name, and the properties that determine, with the recipe, the samples that a run sees."""
        return [
            {
                "name": stream.name,
                "weight": stream.weight,
                "documents": stream.train.num_documents,
                "tokens": len(stream.train.tokens),
                "fingerprint": stream.train.fingerprint,
            }
            for stream in self.streams
        ]


class StartingModel(NamedTuple):
    """What a corpus takes from the model that is trained on it."""

    directory: Path | None = None
    """Its Hugging Face directory, whose tokenizer `tokenizer: auto` uses."""
    rows: int | None = None
    """The rows of its embedding, if its weights are given; None: the recipe gives each token a row."""


NO_MODEL = StartingModel()


def prepare_corpus(
    data: DataSpec,
    *,
    base_dir: Path,
    model: StartingModel = NO_MODEL,
    progress: Progress | None = None,
    processes: int | None = None,
    mend: Callable[[str], None] | None = None,
) -> Corpus:
    """Tokenize the sources, or find the tokens in the cache.

    `base_dir` is the recipe's folder, to which sources and tokenizer are relative. A token without a row in `model` is
    an error where it occurs. A tokenizer is trained on the training documents only, or on evenly spaced blocks of them
    if they are longer than TRAINING_CHARACTERS. `processes` as in `Tokenization`.

    The cache is keyed by the names, sizes and modification times of the source files, by the tokenizer and by the
    held-out share. That is one `stat` per file, so starting a run never reads the corpus again. (A change of text that
    keeps size and time goes unnoticed.) Prepared tokens and given token files have checksums, compared when a block is
    first read. With `mend` everything is compared now; it is called with each damage, and damaged files are rebuilt.
    Complete tokens appear by one rename; the work of a killed process is resumed. If several processes need the same
    tokens, one builds them and the others wait.

    Raises UserError for errors in sources, tokenizer or cache.
    """
    progress = progress or (lambda what, done, total: None)
    cache = Path(data.cache_dir)
    groups = group_files(data, told_apart(find_files(data, base_dir)))
    tokenizer = find_tokenizer(data, base_dir=base_dir, model=model)
    splits: dict[str, Split] = {}
    if tokenizer is None:
        tokenizer = _with_rows(_trained_tokenizer(data, cache, groups, splits, progress), model, data)
    records = None
    if any(files[0].is_records for files in groups.values()):
        records = encoder_of_records(data, tokenizer, base_dir)
        if records.template is not None:
            tokenizer = tokenizer.with_chat_template(records.template.source)
    streams = []
    for name, files in groups.items():
        if files[0].is_tokens:
            train, held_out = _given_tokens(files[0], data, cache, tokenizer, mend)
        else:
            encoder = records if files[0].is_records and records else TextEncoder(tokenizer)
            work = Tokenization(
                files=files,
                held_out=data.held_out,
                tokenizer=tokenizer,
                encoder=encoder,
                progress=progress,
                split=splits.get(name),
                processes=processes,
            )
            train, held_out = _tokenized(work, cache, mend)
        weight = data.sources[files[0].source].weight
        formats = ("tokens",) if files[0].is_tokens else tuple(dict.fromkeys(file.format for file in files))
        stream = TokenStream(
            name=name, train=train, held_out=held_out, weight=weight, formats=formats, files=tuple(files)
        )
        streams.append(stream)
    note = records.note([file for files in groups.values() for file in files]) if records else ""
    return Corpus(tokenizer=tokenizer, streams=tuple(streams), note=note)


def check_whole(data: DataSpec) -> None:
    """Raise UserError if the packing would cut records."""
    if data.packing == "concatenated":
        raise UserError(
            "data.packing=concatenated would cut conversations at arbitrary positions; set data.packing=best_fit and "
            "data.separate_documents=true, or data.packing=padded"
        )


def encoder_of_records(data: DataSpec, tokenizer: TextTokenizer, base_dir: Path) -> RecordEncoder:
    """The encoder of the recipe's records. Raises UserError if they would be cut, or have no template."""
    check_whole(data)
    return record_encoder(tokenizer, data.chat, base_dir=base_dir, max_labels=data.sequence_length)


def find_tokenizer(data: DataSpec, *, base_dir: Path, model: StartingModel = NO_MODEL) -> TextTokenizer | None:
    """The tokenizer that a recipe names, for the rows of `model`; None if `auto` means training one on the corpus."""
    path = model.directory
    if data.tokenizer != "auto":
        path = base_dir / os.path.expanduser(data.tokenizer)
        path = path if path.exists() else cached_snapshot(data.tokenizer, "tokenizer.json") or path
    return _with_rows(load_tokenizer(path), model, data) if path else None


def _with_rows(tokenizer: TextTokenizer, model: StartingModel, data: DataSpec) -> TextTokenizer:
    try:
        return tokenizer.for_rows(model.rows)
    except UserError as error:
        raise UserError(f"data.tokenizer={data.tokenizer}: {error}") from None


def group_files(data: DataSpec, files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """The files of each stream, by its name. Every token file is a stream; so is every source with a name or a weight.
    The other sources form up to three streams: text, conversations (and other records), and preferences."""
    streams: dict[str, list[SourceFile]] = {}
    for file in files:
        source = data.sources[file.source]
        if file.is_tokens:
            name = file.name
        elif source.name or source.weight is not None:
            name = source.name or source.path
        else:
            name = {"text": "text", "preference": "preferences"}.get(file.format, "conversations")
        streams.setdefault(name, []).append(file)
    for name, group in streams.items():
        if group[0].format == "preference" and not data.separate_documents:
            raise UserError("one sample holds both answers of a preference pair; set data.separate_documents=true")
        kinds = {"text": "text", "preference": "preferences"}
        if len(mixed := sorted({kinds.get(file.format, "conversations") for file in group})) > 1:
            raise UserError(f"data source {name} mixes {' and '.join(mixed)}; make each its own source")
    return streams


def _tokenized(
    work: Tokenization, cache: Path, mend: Callable[[str], None] | None
) -> tuple[TokenFile, TokenFile | None]:
    """The tokens of text or records: (train, held out)."""
    about = [_identities(work.files), work.held_out, _identity(work.tokenizer)]
    if isinstance(work.encoder, RecordEncoder):
        about.append(work.encoder.fingerprint)
    directory = cached(cache, about, work.write)
    if mend and (damage := damage_of(directory)):
        mend(damage)
        shutil.rmtree(directory)
        directory = cached(cache, about, work.write)
    rebuild = f"; delete {directory} to build it again"
    names, is_pairs = [TRAIN, *([HELD_OUT] if work.held_out else [])], work.files[0].format == "preference"
    train, *held_out = (
        replace(open_token_file(directory / name, work.tokenizer, rebuild=rebuild), is_pairs=is_pairs) for name in names
    )
    return train, held_out[0] if held_out else None


def _given_tokens(
    file: SourceFile, data: DataSpec, cache: Path, tokenizer: TextTokenizer, mend: Callable[[str], None] | None
) -> tuple[TokenFile, TokenFile | None]:
    """The tokens of a token file: (train, held out). The file is scanned once; the cache keeps the result."""
    dtype = np.dtype(file.tokens).newbyteorder("<") if file.tokens else None

    def scan(directory: Path) -> None:
        if dtype is None:
            opened = open_token_file(file.path, tokenizer)
            assert opened.lengths is not None
            check_places(opened, opened.lengths)
            tokens = opened.tokens
        else:
            tokens = np.memmap(file.path, dtype=dtype, mode="r")
        if looks_wider(tokens):
            raise UserError(f"{file.name}: its 16-bit values look like halves of 32-bit ones; set tokens: uint32")
        largest, lengths = scan_tokens(tokens, eos_id=tokenizer.eos_id)
        if largest >= tokenizer.vocab_size:
            raise UserError(
                f"{file.name}: token {largest} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}; set "
                "data.tokenizer to the tokenizer that made this file, or the source's tokens to the right integer type"
            )
        try:
            tokenizer.checked([largest])
        except UserError as error:
            raise UserError(f"{file.name}: {error}") from None
        if dtype is not None:  # the index has no code for uint32, whose numbers are as wide as int32's
            write_index(directory / f"{SCANNED}.idx", lengths, np.dtype("<u2" if dtype.itemsize == 2 else "<i4"))
        sums_of(file.path).tofile(directory / f"{SCANNED}{ENDING}")

    about = [file.identity(), _identity(tokenizer)]
    directory = cached(cache, about, scan)
    if mend and not np.array_equal(np.fromfile(directory / f"{SCANNED}{ENDING}", "<u4"), sums_of(file.path)):
        mend(f"{file.name} has changed since it was first read")
        shutil.rmtree(directory)
        directory = cached(cache, about, scan)
    if dtype is None:
        whole = open_token_file(file.path, tokenizer)
    else:
        whole = open_indexed(file.path, index=directory / f"{SCANNED}.idx", dtype=dtype)
    sums = BlockChecksums(
        file.path,
        np.fromfile(directory / f"{SCANNED}{ENDING}", "<u4"),
        f"; if it should have changed, delete {directory} to read it again",
    )
    whole = replace(whole, tokens=sums.numbers(whole.tokens.dtype, 0, len(whole.tokens)))
    if not data.held_out:
        return whole, None
    train = whole.num_documents - max(1, round(data.held_out * whole.num_documents))
    if train < 1:
        raise UserError(f"{file.name} has only one document, too few to hold one out; set data.held_out=0")
    return whole.part(0, train), whole.part(train, whole.num_documents)


def needs_tokenizer(file: SourceFile) -> UserError:
    """The error if no tokenizer is given and none can be trained on `file`."""
    if file.is_tokens:
        return UserError(f"{file.name} contains tokens; set data.tokenizer to the tokenizer that made them")
    return UserError(
        f"{file.name} contains records, but a tokenizer is trained only on text; set data.tokenizer to the "
        "tokenizer of a Hugging Face model or of a run (runs/base/tokenizer)"
    )


def _trained_tokenizer(
    data: DataSpec, cache: Path, groups: dict[str, list[SourceFile]], splits: dict[str, Split], progress: Progress
) -> TextTokenizer:
    """A tokenizer trained on the corpus; records the splits that it had to choose."""
    for files in groups.values():
        if files[0].is_tokens or files[0].is_records:
            raise needs_tokenizer(files[0])

    def build(directory: Path) -> None:
        num_characters = 0
        for name, files in groups.items():
            documents = counted("reading", files, progress)
            splits[name], census = plan_split(documents, data.held_out, where=names_of(files))
            num_characters += census.num_characters
        texts = (
            text
            for name, files in groups.items()
            for document in counted("training the tokenizer", files, progress)
            for held_out, text in splits[name].parts(document.text, text_hash(document.text))
            if not held_out
        )
        train_tokenizer(_sample(texts, num_characters), data.tokenizer_vocab).save(directory / TOKENIZER)
        write_sums(directory / TOKENIZER / "tokenizer.json")

    about = [_identities([file for files in groups.values() for file in files]), data.held_out, data.tokenizer_vocab]
    directory = cached(cache, [*about, list(groups)], build)
    BlockChecksums.beside(
        directory / TOKENIZER / "tokenizer.json", f"; delete {directory} to train it again"
    ).compare_all()
    return load_tokenizer(directory / TOKENIZER)


def _identity(tokenizer: TextTokenizer) -> str | list[Any]:
    """A value that is equal for tokenizers that encode every document to the same tokens, or raise the same errors."""
    return tokenizer.fingerprint if tokenizer.rows is None else [tokenizer.fingerprint, tokenizer.rows]


def _identities(files: Sequence[SourceFile]) -> list[tuple[Any, ...]]:
    return [file.identity() for file in files]


def _sample(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    """The texts; if they exceed TRAINING_CHARACTERS, evenly spaced blocks of about that many characters."""
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
