"""The one place that knows how tokens lie on disk: a file of integers and a json that describes it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Tokens of many documents, each followed by the end-of-text token, mapped into memory."""

    path: Path
    """The file."""
    tokens: np.ndarray
    """(num_tokens,) uint16 or uint32, read-only, read from disk as it is touched."""
    num_documents: int
    """Documents in the file."""


class TokenWriter:
    """Writes a token file document by document; it exists for readers once `close` has returned."""

    def __init__(self, path: Path, tokenizer: TextTokenizer):
        self._path, self._tokenizer = path, tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._file = path.open("wb")
        self._num_documents = 0

    def write(self, ids: Sequence[int]) -> None:
        """Append token ids to the current document."""
        self._file.write(np.asarray(ids, dtype=self._dtype).data)

    def end_document(self) -> None:
        """Append the end-of-text token."""
        self.write([self._tokenizer.eos_id])
        self._num_documents += 1

    def close(self) -> None:
        """Bring everything to disk, then write the description."""
        num_tokens = self._file.tell() // self._dtype.itemsize
        _to_disk(self._file)
        self._file.close()
        about = {
            "num_tokens": num_tokens,
            "dtype": self._dtype.name,
            "num_documents": self._num_documents,
            "tokenizer": self._tokenizer.fingerprint,
        }
        with _about_path(self._path).open("w") as file:
            json.dump(about, file, indent=2)
            _to_disk(file)


def open_token_file(path: Path, tokenizer: TextTokenizer) -> TokenFile:
    """Map a token file into memory.

    Raises ValueError when it is not as its description says, or was made by another tokenizer.
    """
    try:
        about = json.loads(_about_path(path).read_bytes())
        dtype, num_tokens = np.dtype(about["dtype"]), about["num_tokens"]
        num_bytes = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete {path.parent} to build it again") from error
    if num_bytes != num_tokens * dtype.itemsize:
        raise ValueError(
            f"{path} is damaged: it has {num_bytes} bytes instead of {num_tokens * dtype.itemsize}; "
            f"delete {path.parent} to build it again"
        )
    if about["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(f"{path} was made by another tokenizer; delete {path.parent} to build it again")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(path=path, tokens=tokens, num_documents=about["num_documents"])


def _about_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())
