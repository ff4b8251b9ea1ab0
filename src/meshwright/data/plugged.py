"""Plugged-in datasets: any iterable of texts, records or token ids, written once to a file that every rank reads.

A dataset is read in its own order, until it ends or has as much as the run will see. The items are cached under the
hash of their content: the same items give the same file, so a resumed run continues at the same position.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.token_file import write_index
from meshwright.data.tokenizer import numbers_tokenizer
from meshwright.spec.data import DATASET, DataSpec
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import PluginSpec, make_plugin

FOLDER = "datasets"
"""Folder of cached datasets in the cache."""
CHARACTERS_PER_TOKEN = 8
"""An upper bound of the average, for any language."""
TOKENS = np.dtype("<i4")
"""The dtype of stored token ids."""


def has_datasets(data: DataSpec) -> bool:
    """Whether a recipe names a plugged-in dataset."""
    return any(source.path.startswith(DATASET) for source in data.sources)


def write_datasets(data: DataSpec, *, samples: int, vocab: int, numbers: bool) -> DataSpec:
    """The data section with files instead of plugged-in datasets.

    Args:
        samples: number of samples that the run will see; no more is read from a dataset.
        vocab: the model's vocabulary size; token ids must be below it.
        numbers: whether to use a tokenizer that writes ids as numbers, if there is no other.

    Raises `UserError` for items that are neither text, record nor token ids, or of another kind than the first.
    """
    sources, kinds = [], set()
    for source in data.sources:
        if source.path.startswith(DATASET):
            name = source.path.removeprefix(DATASET)
            dataset = make_plugin("datasets", PluginSpec(name=name, options=source.options))
            path, is_tokens = _write(dataset, f"dataset {name}", data, samples, vocab)
            source = source.model_copy(update={"path": str(path), "options": {}, "name": source.name or name})
            kinds.add(is_tokens)
        sources.append(source)
    update: dict[str, Any] = {"sources": tuple(sources)}
    if True in kinds and numbers:
        folder = Path(data.cache_dir).resolve() / FOLDER / f"numbers-{vocab}"
        numbers_tokenizer(vocab).save(folder)
        update["tokenizer"] = str(folder)
    return data.model_copy(update=update)


def _write(dataset: Any, where: str, data: DataSpec, samples: int, vocab: int) -> tuple[Path, bool]:
    """(the file, whether it holds token ids) with the items of a dataset, as many as are needed."""
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        hint = "call it" if callable(dataset) else "pass a list of items (set file paths in data.sources)"
        raise UserError(f"{where}: a {type(dataset).__name__} is not an iterable of items; {hint}")
    items = iter(dataset)
    try:
        first = next(items)
    except StopIteration:
        raise UserError(
            f"{where}: yields no item; an iterator can be read only once, so pass a list, or an object whose "
            "__iter__ starts over"
        ) from None
    kind, folder = _kind(first, f"{where}: item 1"), Path(data.cache_dir).resolve() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    whole = samples / (1 - data.held_out) + 2
    enough = (whole, 0.0) if data.packing == "padded" else (0.0, whole * data.sequence_length + 1)
    numbered = (
        (item, f"{where}: item {number}") for number, item in zip(count(1), chain([first], items), strict=False)
    )
    if kind == "tokens":
        return _write_tokens(_checked(numbered, kind), folder, enough, vocab), True
    with _new_file(folder) as file:
        digest, length = hashlib.blake2b(digest_size=12), 0
        for number, (item, place) in enumerate(_checked(numbered, kind), start=1):
            line = _line({"text": item} if kind == "text" else item, place)
            file.write(line)
            digest.update(line)
            length += len(line)
            if number >= enough[0] and length >= CHARACTERS_PER_TOKEN * enough[1]:
                break
    return _publish(Path(file.name), folder / f"{digest.hexdigest()}.jsonl"), False


@contextmanager
def _new_file(folder: Path) -> Iterator[Any]:
    """A temporary file, removed if writing it fails."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        try:
            yield file
        except BaseException:
            os.unlink(file.name)
            raise


def _write_tokens(items: Iterator[tuple[Any, str]], folder: Path, enough: tuple[float, float], vocab: int) -> Path:
    with _new_file(folder) as file:
        digest, lengths, tokens, longest = hashlib.blake2b(digest_size=12), [], 0, 0
        for item, place in items:
            ids = np.asarray(item)
            if len(wrong := ids[(ids < 0) | (ids >= vocab)]):
                raise UserError(f"{place} has token {wrong[0]}, but the model's vocabulary is 0 to {vocab - 1}")
            file.write(ids.astype(TOKENS).data)
            digest.update(ids.astype(TOKENS).tobytes() + b"|")
            lengths.append(len(ids))
            tokens, longest = tokens + len(ids), max(longest, len(ids))
            if len(lengths) >= enough[0] and tokens - longest >= enough[1]:
                break
    path = folder / f"{digest.hexdigest()}.bin"
    with _new_file(folder) as index:
        write_index(Path(index.name), np.array(lengths), TOKENS)
    _publish(Path(index.name), path.with_suffix(".idx"))
    _publish(Path(file.name), path)
    return path.with_suffix(".idx")


def _publish(written: Path, path: Path) -> Path:
    """Rename a file to its final name, unless an equal file exists."""
    if path.exists():
        written.unlink()
    else:
        os.replace(written, path)
    return path


def _checked(items: Iterator[tuple[Any, str]], kind: str) -> Iterator[tuple[Any, str]]:
    for item, place in items:
        if _kind(item, place) != kind:
            raise UserError(f"{place} is {_kind(item, place)}, but the first is {kind}; pass items of one kind")
        yield item, place


def _kind(item: Any, place: str) -> str:
    """The kind of an item: text, a record or tokens."""
    if isinstance(item, str):
        return "text"
    if isinstance(item, Mapping):
        return "a record"
    ids = None if isinstance(item, bytes) or not hasattr(item, "__len__") else np.asarray(item)
    if ids is None or ids.ndim != 1 or not (len(ids) and np.issubdtype(ids.dtype, np.integer)):
        what = "an empty one" if ids is not None and not len(ids) else f"a {type(item).__name__}"
        raise UserError(f"{place} is {what}; pass text, a record (a dict), or token ids (a list or array of integers)")
    return "tokens"


def _line(record: Mapping[str, Any], place: str) -> bytes:
    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):  # numpy's and torch's
            return value.tolist()
        raise TypeError(f"it holds {type(value).__name__}")

    try:
        return json.dumps(dict(record), ensure_ascii=False, default=plain).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: cannot be written as JSON: {error}") from error
