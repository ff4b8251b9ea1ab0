"""The one place that finds the files of a corpus and reads documents out of them."""

import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from meshwright.spec.data import STDLIB, SourceSpec

STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
"""Folders that the stdlib corpus leaves out.

Installed packages are not the standard library. Tests are two thirds of its text, hold deliberately broken
files, and are not on every machine. `encodings` is a hundred generated tables, each nearly a copy of the
next, so that the split by document would show the held-out ones to training.
"""

NOT_TEXT = frozenset(
    [".json", ".csv", ".parquet", ".arrow", ".bin", ".npy", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"]
)
"""Endings refused: read as plain text, these would train silently on markup or fail at the first byte."""


class Document(NamedTuple):
    """One document of a corpus."""

    id: str
    """Where it lies: the file's name, with the line of a .jsonl file."""
    text: str
    """Its text, never empty."""
    num_bytes: int
    """Bytes of the file that it took."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a corpus."""

    path: Path
    """Where to open it."""
    name: str
    """Its name in messages and document ids: relative to the recipe, or `stdlib/...`."""
    text_key: str | None
    """Key of the text in every line of JSON; None: the whole file is one document."""


def find_files(sources: Sequence[SourceSpec], base_dir: Path) -> list[SourceFile]:
    """The files of all sources: sources in their order, the files of each sorted by name.

    Raises ValueError when a source matches nothing, or no text, and when a file would be read twice.
    """
    files = [file for source in sources for file in _files_of(source, base_dir)]
    names: dict[Path, str] = {}
    for file in files:
        path = file.path.resolve()
        if path in names:
            raise ValueError(f"data.sources would read one file twice: as {names[path]} and as {file.name}")
        names[path] = file.name
    return files


def read_documents(files: Iterable[SourceFile]) -> Iterator[Document]:
    """The documents of these files, in order, one in memory at a time; empty ones are left out.

    Raises ValueError, naming file and byte or line, at text that is not UTF-8 and at lines that are not
    JSON objects with a string under the file's key.
    """
    for file in files:
        yield from _read_text(file) if file.text_key is None else _read_json_lines(file, file.text_key)


def _files_of(source: SourceSpec, base_dir: Path) -> list[SourceFile]:
    if source.path == STDLIB:
        return _stdlib_files()
    pattern = os.path.expanduser(source.path)
    if (base_dir / pattern).is_dir():
        raise ValueError(f"data source {source.path} is a folder; say which files, as in {source.path}/**/*.txt")
    # A name that exists is taken literally, so that brackets in file names need no escape.
    literal = (base_dir / pattern).is_file()
    names = [pattern] if literal else glob.glob(pattern, root_dir=base_dir, recursive=True)
    files = [_source_file(name, source, base_dir) for name in sorted(names) if (base_dir / name).is_file()]
    if not files:
        raise ValueError(f"data source {source.path} matches no file (looked in {base_dir.resolve()})")
    return files


def _source_file(name: str, source: SourceSpec, base_dir: Path) -> SourceFile:
    ending = Path(name).suffix.lower()
    if ending in NOT_TEXT:
        raise ValueError(f"{name}: {ending} files cannot be read; make it .jsonl, or plain text such as .txt")
    return SourceFile(path=base_dir / name, name=name, text_key=source.text_key if ending == ".jsonl" else None)


def _stdlib_files() -> list[SourceFile]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - STDLIB_LEFT_OUT
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            name = f"{STDLIB}/{path.relative_to(folder).as_posix()}"
            files.append(SourceFile(path=path, name=name, text_key=None))
    if not files:
        raise ValueError(
            f"this Python keeps no source text of its standard library (looked for .py files in {folder}); "
            f"give data.sources a file or glob instead of {STDLIB}"
        )
    return sorted(files, key=lambda file: file.name)


def _read_text(file: SourceFile) -> Iterator[Document]:
    with _open(file) as opened:
        content = opened.read()
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}: not UTF-8 at byte {error.start}") from error
    if text:
        yield Document(file.name, text, len(content))


def _read_json_lines(file: SourceFile, key: str) -> Iterator[Document]:
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file.name}:{number}"
            if line.strip() and (text := _text_of(line, key, where)):
                yield Document(where, text, len(line))


def _open(file: SourceFile) -> BinaryIO:
    try:
        return file.path.open("rb")
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from error


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict) or key not in fields:
        found = f"its keys are {', '.join(fields)}" if isinstance(fields, dict) else "it is no object"
        raise ValueError(f"{where}: no {key!r} in this line ({found}); set the source's text_key")
    text = fields[key]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {key!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {key!r} is not Unicode text: a lone surrogate at character {error.start}"
        ) from error
    return text
