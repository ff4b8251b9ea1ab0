"""Evaluation questions that occur in the training data: shared n-grams of tokens.

Every `n` consecutive tokens of a question are searched in all training tokens by a rolling hash, and every hit is
compared token by token. Shapes: N tokens, W windows of n tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.jsonl import read_values

NGRAM = 13
"""Default length of a run, in tokens; Brown et al. (2020) took 13 words."""
CHUNK = 2**20
"""Training tokens hashed at a time."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that every token of a window counts; products wrap at 2**64."""


@dataclass
class Shared:
    """One row of an evaluation file, and its overlap with the training data."""

    line: int
    windows: int
    """Runs of n tokens in it."""
    found: int = 0
    """How many of these runs are in the training data."""
    example: str = ""
    """The first shared run, as text."""
    place: str = ""
    """The location of the overlap."""


@dataclass
class Overlap:
    """The overlap of one evaluation file."""

    file: str
    rows: int
    short: int
    """Rows without a text of n tokens, which cannot be checked."""
    shared: list[Shared] = field(default_factory=list)
    """Rows that share a run, the largest shared part first."""


def find_overlap(corpus: Corpus, files: Sequence[Path], length: int = NGRAM) -> list[Overlap]:
    """The rows of each file that share `length` tokens in a row with the training data of any stream.

    Raises `UserError` if a file cannot be read.
    """
    rows = [(path, line, texts) for path in files for line, texts in _texts_of(path)]
    windows, owners = _windows(corpus.tokenizer, [texts for _, _, texts in rows], length)
    counted = [Shared(line, int((owners == index).sum())) for index, (_, line, _) in enumerate(rows)]
    if len(windows):
        for stream in corpus.streams:
            _search(stream.name, stream.train, corpus.tokenizer, windows, owners, counted)
    reports = []
    for path in files:
        mine = [one for (of, _, _), one in zip(rows, counted, strict=True) if of == path]
        shared = sorted((one for one in mine if one.found), key=lambda one: (-one.found / one.windows, one.line))
        reports.append(Overlap(str(path), len(mine), sum(not one.windows for one in mine), shared))
    return reports


def _texts_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, its texts) of a .jsonl file; any other file is one row."""
    if path.suffix == ".jsonl":
        yield from ((number, list(_strings(value))) for number, value in read_values(path))
        return
    try:
        yield 1, [regular(path).read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))


def _windows(tokenizer: TextTokenizer, rows: Sequence[Sequence[str]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Every run of `length` tokens in the rows' texts, int64 [W, length], and the row of each."""
    parts, owners = [np.zeros((0, length), np.int64)], [np.zeros(0, np.int64)]
    for index, texts in enumerate(rows):
        encoded = tokenizer.encode_batch([text.strip() for text in texts])
        for ids in encoded:
            if len(ids) >= length:
                runs = sliding_window_view(np.asarray(ids, np.int64), length)
                parts.append(runs)
                owners.append(np.full(len(runs), index))
    return np.concatenate(parts), np.concatenate(owners)


def _hashes(windows: np.ndarray) -> np.ndarray:
    """A hash of each window, uint64 [W]; `windows`: uint64 [W, n]."""
    total = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        total = total * _FACTOR + column + np.uint64(1)
    return total


def _search(
    name: str,
    file: TokenFile,
    tokenizer: TextTokenizer,
    windows: np.ndarray,
    owners: np.ndarray,
    counted: list[Shared],
) -> None:
    """Record which windows are among the file's tokens."""
    length = windows.shape[1]
    hashes = _hashes(windows.astype(np.uint64))
    order = np.argsort(hashes, kind="stable")
    ordered, seen = hashes[order], np.zeros(len(windows), bool)
    starts = file.starts()
    for begin in range(0, max(0, len(file.tokens) - length + 1), CHUNK):
        tokens = np.asarray(file.tokens[begin : begin + CHUNK + length - 1])
        here = _hashes(sliding_window_view(tokens.astype(np.uint64), length))
        first = np.searchsorted(ordered, here)
        hits = np.flatnonzero(ordered[np.minimum(first, len(ordered) - 1)] == here)
        for hit in hits.tolist():
            place = int(first[hit])
            while place < len(ordered) and ordered[place] == here[hit]:
                window = int(order[place])
                if not seen[window] and np.array_equal(windows[window], tokens[hit : hit + length]):
                    seen[window] = True
                    row = counted[owners[window]]
                    row.found += 1
                    if not row.example:
                        document = int(np.searchsorted(starts, begin + hit, side="right"))
                        row.example = tokenizer.decode(windows[window].tolist())
                        row.place = f"{name}, document {document}"
                place += 1
