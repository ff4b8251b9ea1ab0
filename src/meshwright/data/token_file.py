"""Token files: integers on disk, with Megatron's index of documents.

`x.bin` contains consecutive tokens. `x.idx` is little-endian, as Megatron-LM's `IndexedDataset` reads and writes it:
the 9 bytes of MAGIC, u64 version 1, u8 code of the dtype, u64 number S of sequences, u64 number of documents plus one,
then i32[S] lengths of sequences in tokens, i64[S] offsets of sequences in `x.bin` in bytes, i64 first sequence of every
document and S. Files written here have one sequence per document. `x.json` names the tokenizer; files made elsewhere
have none. `x.mask` exists if only some tokens carry loss; it has one byte for each token: 1 for tokens with loss.
"""

import bisect
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from meshwright.data.checksums import BlockChecksums, Checked, write_sums
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.sync import sync_file

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's codes; 6 and 7 are floats."""
SMALL_VOCABULARY = 65500
"""Megatron's builder uses uint16 below this many tokens, else int32."""
MASK = ".mask"
"""Suffix of the file that marks the tokens with loss."""
ABOUT = ".json"
"""Suffix of the file that names the tokenizer."""
LENGTHS = ".lengths"
"""Suffix of the writer's file of document lengths, for resuming and for the index."""
BLOCK = 1 << 20
"""Numbers processed at a time."""
SAMPLES, SAMPLE = 1024, 512
"""Number of blocks in a fingerprint, and tokens of a block."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Tokens of many documents, each followed by the end-of-text token, memory-mapped, with document boundaries."""

    path: Path
    """The file."""
    tokens: np.ndarray
    """(num_tokens,) integers, read-only, read from disk on access."""
    places: np.ndarray
    """Byte offset of each sequence, in memory or mapped."""
    firsts: np.ndarray
    """First sequence of each document, and the number of sequences."""
    begin: int = 0
    """Number of the file's documents before the first one here."""
    trained: np.ndarray | None = None
    """(num_tokens,) uint8: 1 for a token with loss, else 0; None: all carry loss."""
    is_pairs: bool = False
    """Whether its documents are preferences: the chosen and the rejected answer of a pair, pair after pair."""
    lengths: np.ndarray | None = None
    """(num_sequences,) tokens of each sequence, from the index; None for a file in memory."""
    references: np.ndarray | None = None
    """The reference's margin of each pair, float64: log p(chosen) - log p(rejected)."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of records cut off or left out when the file was made, by reason."""

    @property
    def num_documents(self) -> int:
        """Documents here."""
        return len(self.firsts) - 1

    def start(self, document: int) -> int:
        """Index of a document's first token; of the document after the last, the number of tokens."""
        if document == self.num_documents:
            return len(self.tokens)
        return self._place(document) - self._place(0)

    def document_at(self, token: int) -> int:
        """The document that a token belongs to."""
        return bisect.bisect_right(range(self.num_documents), token, key=self.start) - 1

    def starts(self) -> np.ndarray:
        """`start` of all documents at once: int64 (num_documents + 1,)."""
        starts = self.places[self.firsts[:-1]] // self.tokens.itemsize
        return np.append(starts - starts[:1], len(self.tokens))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for files of the same documents; different if some were added, removed, moved or cut differently.

        For a large file it covers the offsets of SAMPLES documents and SAMPLES blocks of tokens, evenly spaced, so it
        costs the same for any size. It misses a word elsewhere that is replaced by one with as many tokens.
        """
        digest = hashlib.blake2b(f"{self.num_documents} {len(self.tokens)}".encode(), digest_size=8)
        digest.update(np.array([self.start(document) for document in _evenly(self.num_documents)]).tobytes())
        for start in _evenly(len(self.tokens), SAMPLE):
            digest.update(self.tokens[start : start + SAMPLE].astype("<i8").tobytes())
            if self.trained is not None:
                digest.update(self.trained[start : start + SAMPLE].tobytes())
        return digest.hexdigest()

    def part(self, first: int, last: int) -> "TokenFile":
        """Only documents `first` to `last - 1`."""
        start, stop = self.start(first), self.start(last)
        trained = None if self.trained is None else _span(self.trained, start, stop)
        firsts, begin = _span(self.firsts, first, last + 1), self.begin + first
        return replace(self, tokens=_span(self.tokens, start, stop), firsts=firsts, begin=begin, trained=trained)

    def _place(self, document: int) -> int:
        return int(self.places[self.firsts[document]]) // self.tokens.itemsize


class Mark(NamedTuple):
    """The position up to which a token file has been written."""

    tokens: int = 0
    documents: int = 0
    begun: int = 0
    """Tokens so far of the unfinished document."""


class TokenWriter:
    """Writes a token file document by document; readers can open it after `finish` has returned. Use it in `with`.

    Data written before `sync` returned survives any crash: a writer that starts from its mark continues there.
    """

    def __init__(self, path: Path, tokenizer: TextTokenizer, *, mark: Mark | None = None, masked: bool = False):
        """Start a file, or continue one from `mark`; data after the mark is truncated.

        `masked`: some tokens carry no loss, and a mask is written.
        """
        self._path, self._tokenizer = path, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size < SMALL_VOCABULARY else "<i4")
        self._tokens, self._documents, self._begun = mark or Mark()
        self._synced = mark
        self._file = _open_to_continue(path, self._tokens * self.dtype.itemsize)
        self._lengths = _open_to_continue(path.with_suffix(LENGTHS), self._documents * 4)
        self._mask = _open_to_continue(path.with_suffix(MASK), self._tokens) if masked else None

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append token ids to the current document."""
        self._file.write(np.asarray(ids, dtype=self.dtype).data)
        self._tokens += len(ids)
        self._begun += len(ids)

    def write_document(self, ids: np.ndarray) -> None:
        """Append a document without an end-of-text token, int32 ids; ~id is a token without loss."""
        assert self._mask is not None
        self._mask.write((ids >= 0).astype(np.uint8).data)
        self.write(np.where(ids < 0, ~ids, ids))
        self._end()

    def end_document(self) -> None:
        """Append the end-of-text token."""
        self.write([self._tokenizer.eos_id])
        self._end()

    def _end(self) -> None:
        if self._begun >= 1 << 31:
            raise UserError(f"{self._path}: a document has {self._begun} tokens; the index supports fewer than 2**31")
        self._lengths.write(struct.pack("<i", self._begun))
        self._documents, self._begun = self._documents + 1, 0

    def sync(self) -> Mark:
        """Flush everything to disk, and return the mark."""
        mark = Mark(self._tokens, self._documents, self._begun)
        if mark != self._synced:
            for file in self._files:
                sync_file(file)
            self._synced = mark
        return mark

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    @property
    def _files(self) -> list[BinaryIO]:
        return [self._file, self._lengths, *([self._mask] if self._mask else [])]

    def finish(self, counts: Mapping[str, int] | None = None) -> None:
        """Flush everything to disk, then write index and description; a writer may still continue from the end.

        `counts` are stored for `TokenFile.counts`.
        """
        self.sync()
        lengths = _map(self._path.with_suffix(LENGTHS), np.dtype("<i4"), 0, self._documents)
        index = self._path.with_suffix(".idx")
        write_index(index, lengths, self.dtype)
        about = {
            "num_tokens": self._tokens,
            "dtype": self.dtype.name,
            "num_documents": self._documents,
            "tokenizer": self._tokenizer.fingerprint,
            **({"counts": counts} if counts else {}),
        }
        for path in (self._path, index, *([self._path.with_suffix(MASK)] if self._mask else [])):
            write_sums(path)
        with self._path.with_suffix(ABOUT).open("w") as file:
            json.dump(about, file, indent=2)
            sync_file(file)


def _evenly(length: int, step: int = 1) -> list[int]:
    """At most SAMPLES evenly spaced numbers in [0, `length`), at least `step` apart."""
    count = min(SAMPLES, -(-length // step))
    return [number * length // count for number in range(count)]


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write an .idx of documents of `lengths` tokens, one sequence each, in constant memory."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
        blocks = range(0, len(lengths), BLOCK)
        for first in blocks:
            file.write(lengths[first : first + BLOCK].astype("<i4").data)
        place = 0
        for first in blocks:
            block = lengths[first : first + BLOCK].astype("<i8") * dtype.itemsize
            file.write((place + np.cumsum(block) - block).data)
            place += int(block.sum())
        for first in range(0, len(lengths) + 1, BLOCK):
            file.write(np.arange(first, min(first + BLOCK, len(lengths) + 1), dtype="<i8").data)
        sync_file(file)


def open_token_file(path: Path, tokenizer: TextTokenizer, *, rebuild: str = "") -> TokenFile:
    """Map `x.bin` and `x.idx` into memory.

    Raises UserError if they do not match, or another tokenizer made them; the message ends with `rebuild`.
    """
    try:
        about = json.loads(regular(path.with_suffix(ABOUT)).read_bytes()) if rebuild else _about(path)
        made_by = about and about["tokenizer"]
        file = open_indexed(path, remedy=rebuild or None)
    except UserError as error:
        raise UserError(str(error).removesuffix(rebuild) + rebuild) from error
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}){rebuild}") from error
    if made_by not in (None, tokenizer.fingerprint):
        raise UserError(f"{path} was made by another tokenizer{rebuild}")
    return replace(
        file, trained=_open_mask(path, len(file.tokens), rebuild), counts=about.get("counts", {}) if about else {}
    )


def open_indexed(
    path: Path, *, index: Path | None = None, dtype: np.dtype | None = None, remedy: str | None = None
) -> TokenFile:
    """Map a file of tokens and its index (default: the .idx next to it) into memory; `dtype` overrides the index's.

    With a `remedy`, which ends messages about damage, both have checksums, compared when a block is first read. Raises
    UserError if the two do not match.
    """
    index = index or path.with_suffix(".idx")
    indexed_dtype, lengths, places, firsts = _open_index(index, remedy)
    dtype = dtype or indexed_dtype
    expected = int(places[-1]) + int(lengths[-1]) * dtype.itemsize if len(places) else 0
    num_bytes = path.stat().st_size
    if num_bytes != expected:
        raise UserError(f"{path} is damaged: it has {num_bytes} bytes, but its index requires {expected}")
    sums = None if remedy is None else BlockChecksums.beside(path, remedy)
    tokens = _map(path, dtype, 0, num_bytes // dtype.itemsize, sums)
    return TokenFile(path=path, tokens=tokens, places=places, firsts=firsts, lengths=lengths)


def _open_mask(path: Path, num_tokens: int, rebuild: str) -> np.ndarray | None:
    mask = path.with_suffix(MASK)
    if not mask.exists():
        return None
    if mask.stat().st_size != num_tokens:
        raise UserError(f"{mask} is damaged: it has {mask.stat().st_size} bytes instead of {num_tokens}{rebuild}")
    return _map(mask, np.dtype(np.uint8), 0, num_tokens, BlockChecksums.beside(mask, rebuild) if rebuild else None)


def file_in_memory(
    documents: Sequence[Sequence[int] | np.ndarray], path: Path = Path("memory"), *, masked: bool = False
) -> TokenFile:
    """A token file in memory; each document includes its end-of-text token. `masked`: ~id is a token without loss."""
    ends = np.cumsum([0, *map(len, documents)])
    tokens = np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in documents)])
    trained = (tokens >= 0).astype(np.uint8) if masked else None
    tokens = np.where(tokens < 0, ~tokens, tokens) if masked else tokens
    places = ends[:-1] * tokens.itemsize
    return TokenFile(path=path, tokens=tokens, places=places, firsts=np.arange(len(ends)), trained=trained)


def scan_tokens(tokens: np.ndarray, *, eos_id: int) -> tuple[int, np.ndarray]:
    """(largest token, lengths of documents, each with its closing end-of-text token) of a stream of tokens."""
    largest, ends = -1, []
    for first in range(0, len(tokens), BLOCK):
        block = tokens[first : first + BLOCK]
        # A negative number, read as unsigned, is above every vocabulary.
        largest = max(largest, int(block.max()), int(block.min()) % (1 << 63))
        ends.append(np.flatnonzero(block == eos_id) + first + 1)
    borders = np.concatenate([[0], *ends, [len(tokens)]])
    lengths = np.diff(borders)
    return largest, lengths[lengths > 0]


def check_places(file: TokenFile, lengths: np.ndarray) -> None:
    """Raise UserError if sequences of `lengths` are not contiguous, as in the files of every known builder, or
    documents are out of order."""
    for first in range(0, max(0, len(file.places) - 1), BLOCK):
        places = np.array(file.places[first : first + BLOCK + 1])
        sizes = np.array(lengths[first : first + BLOCK + 1][: len(places) - 1], np.int64) * file.tokens.itemsize
        if (np.diff(places) != sizes).any():
            raise UserError(f"{file.path}: its index lists sequences out of order or with gaps, which is not supported")
    for first in range(0, len(file.firsts) - 1, BLOCK):
        if (np.diff(file.firsts[first : first + BLOCK + 1]) < 0).any():
            raise UserError(f"{file.path}: its index lists documents out of order, which is not supported")


def looks_wider(tokens: np.ndarray) -> bool:
    """Whether 16-bit numbers look like the halves of 32-bit ones: every second one is small."""
    halves = np.asarray(tokens[: min(len(tokens), BLOCK) // 2 * 2]).reshape(-1, 2)
    if tokens.itemsize != 2 or len(halves) < 16:
        return False
    return bool((halves[:, 1] < 8).all()) and len(np.unique(halves[:, 0])) > 8


def _open_index(path: Path, remedy: str | None) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(dtype of the tokens, lengths, places, first sequences) of an .idx."""
    with regular(path).open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path} is not a token index: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise UserError(f"{path}: version {version} with dtype {code} is not supported, only version 1 with integers")
    sizes = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    # Multimodal files have an extra byte per sequence.
    if path.stat().st_size not in (sizes[-1], sizes[-1] + sequences) or not documents:
        raise UserError(f"{path} is damaged: it has {path.stat().st_size} bytes instead of {sizes[-1]}")
    sums = None if remedy is None else BlockChecksums.beside(path, remedy)
    lengths = _map(path, np.dtype("<i4"), int(sizes[0]), sequences, sums)
    places = _map(path, np.dtype("<i8"), int(sizes[1]), sequences, sums)
    firsts = _map(path, np.dtype("<i8"), int(sizes[2]), documents, sums)
    if firsts[0] != 0 or firsts[-1] != sequences:
        raise UserError(f"{path} is damaged: its documents do not begin with sequence 0 and end with {sequences}")
    return np.dtype(DTYPES[code]).newbyteorder("<"), lengths, places, firsts


def _span(numbers: np.ndarray, start: int, stop: int) -> np.ndarray:
    """A part, compared with checksums only when it is read."""
    return numbers.span(start, stop) if isinstance(numbers, Checked) else numbers[start:stop]


def _map(path: Path, dtype: np.dtype, offset: int, count: int, sums: BlockChecksums | None = None) -> np.ndarray:
    """Numbers of a file; with `sums`, compared with these when they are read."""
    if not count:  # an empty range cannot be mapped
        return np.zeros(0, dtype)
    if sums is not None:
        return sums.numbers(dtype, offset, count)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _open_to_continue(path: Path, num_bytes: int) -> BinaryIO:
    file = path.open("r+b" if path.exists() else "w+b")
    file.seek(file.truncate(num_bytes))
    return file


def _about(path: Path) -> dict[str, Any] | None:
    """Our description next to a token file; None if it does not exist or the .json is not ours."""
    try:
        about = json.loads(regular(path.with_suffix(ABOUT)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    ours = {"num_tokens", "dtype", "num_documents", "tokenizer"}
    return about if isinstance(about, dict) and ours <= about.keys() else None
