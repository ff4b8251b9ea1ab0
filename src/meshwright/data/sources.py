"""Sources: the files of a corpus, and the reader for each, chosen by file name."""

import glob
import importlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from meshwright.spec.data import HUB, STDLIB, DataSpec, Format, SourceSpec
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.files import regular

STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
"""Folders that the stdlib corpus leaves out.

Installed packages are not the standard library. Tests are two thirds of its text, contain deliberately broken files,
and are not on every machine. `encodings` is a hundred generated tables that are nearly copies of each other, so a split
by document would leak held-out ones into training.
"""

Container = Literal["text", "jsonl", "json", "csv", "parquet", "arrow", "megatron", "raw"]

CONTAINERS: dict[str, Container] = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
    ".bin": "raw",
}
"""By file extension; every other file is text."""

COMPRESSED = (".gz", ".zst")
"""Extensions of compression, which may follow the extension of a text, .json, .jsonl or .csv file."""

NOT_TEXT = frozenset([".npy", ".npz", ".xz", ".bz2", ".zip", ".tar", ".pt", ".safetensors"])
"""Refused extensions: read as plain text, these would train silently on markup or fail at the first byte."""

EXTRAS = {"pyarrow": "arrow", "datasets": "hub"}
"""The extra of this package that installs each library."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a corpus."""

    path: Path
    """The path to open; for tokens, the .bin file."""
    name: str
    """Its name in messages and document ids: relative to the recipe, or `stdlib/...`."""
    container: Container
    """How it is read."""
    format: Format = "auto"
    """The format of a line or row; `readers.told_apart` resolves auto."""
    compression: str = ""
    """.gz, .zst or nothing."""
    text_key: str = "text"
    """Key or column of the text."""
    columns: tuple[tuple[str, str | None], ...] = ()
    """Our names of a record's columns and the file's; None: the column is not read."""
    tokens: str | None = None
    """The dtype of a raw token file."""
    source: int = 0
    """Index of its source in the recipe."""
    skips: bool = False
    """Whether text that is not UTF-8 is skipped."""

    @property
    def is_tokens(self) -> bool:
        """Whether it holds tokens instead of text."""
        return self.container in ("megatron", "raw")

    @property
    def is_records(self) -> bool:
        """Whether it holds records of fine-tuning data instead of text."""
        return self.format not in ("auto", "text")

    def identity(self) -> tuple[Any, ...]:
        """A value that changes when the data read from it changes; a cache looks at nothing else."""
        status = self.path.stat()
        return (
            self.name,
            self.format if self.is_records else self.container,
            self.text_key,
            self.tokens,
            *([self.columns] if self.columns else []),
            *(["skips"] if self.skips else []),
            status.st_size,
            status.st_mtime_ns,
        )


def find_files(data: DataSpec, base_dir: Path) -> list[SourceFile]:
    """The files of all sources, without those that the globs in `data.exclude` name: sources in their order, the files
    of each sorted by name. A file that a glob finds under several names, by links, is one file.

    Raises UserError if a source or an `exclude` matches nothing, or nothing that can be read, and if two sources read
    the same file.
    """
    sources, exclude = data.sources, data.exclude
    left_out = {
        pattern: {_identity(path) for name in _globbed(pattern, base_dir) if (path := base_dir / name).is_file()}
        for pattern in exclude
    }
    excluded = _Excluded(set().union(*left_out.values()))
    files = [file for number, source in enumerate(sources) for file in _files_of(source, number, base_dir, excluded)]
    for pattern, identities in left_out.items():
        if not identities & excluded.met:
            raise UserError(f"data.exclude {pattern} matches no file of data.sources (looked in {base_dir.resolve()})")
    known: dict[Path, SourceFile] = {}
    for file in files:
        first = known.setdefault(file.path.resolve(), file)
        if first is not file:
            paths = [sources[one.source].path for one in (first, file)]
            if first.source != file.source and paths[0] == paths[1]:
                raise UserError(f"data source {paths[0]} is given twice; remove one (use weight to change its share)")
            raise UserError(
                f"one file would be read twice: as {first.name} by data source {paths[0]}, and as {file.name} by "
                f"{paths[1]}; remove it from one"
            )
    return [replace(file, skips=data.undecodable == "skip") for file in files]


class _Excluded:
    """The files to leave out, and which of them a source has."""

    def __init__(self, identities: set[tuple[int, int]]) -> None:
        self._identities, self.met = identities, set[tuple[int, int]]()

    def has(self, path: Path) -> bool:
        """Whether a file is left out; of token files, by the name of the index or the tokens."""
        names = [path.with_suffix(suffix) for suffix in (".bin", ".idx")] if path.suffix in (".bin", ".idx") else [path]
        met = {_identity(name) for name in names if self._identities and name.is_file()} & self._identities
        self.met |= met
        return bool(met)


def _identity(path: Path) -> tuple[int, int]:
    """A number of the file itself: equal for all of its names."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _globbed(pattern: str, base_dir: Path) -> list[str]:
    """The names, of files and folders, that a path or a glob stands for."""
    pattern = os.path.expanduser(pattern)
    # A name that exists is taken literally, so that brackets in file names need no escape.
    return [pattern] if (base_dir / pattern).is_file() else glob.glob(pattern, root_dir=base_dir, recursive=True)


def names_of(files: Sequence[SourceFile]) -> str:
    """`a.txt`, or `a.txt and 3 more`, for messages about all of them."""
    return files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def total_bytes(files: Sequence[SourceFile]) -> int:
    """The size of all files on disk."""
    return sum(file.path.stat().st_size for file in files)


def require(library: str, purpose: str) -> ModuleType:
    """An optional library; raises UserError with the command that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        package = library.split(".")[0]
        raise UserError(f"{purpose} needs {package}: {install(EXTRAS[package])}") from error


def _files_of(source: SourceSpec, number: int, base_dir: Path, excluded: _Excluded) -> list[SourceFile]:
    if source.path == STDLIB:
        return [file for file in _stdlib_files(number) if not excluded.has(file.path)]
    if source.path.startswith(HUB):
        files = _arrow_files(_hub_files(source), source)
    elif (folder := base_dir / os.path.expanduser(source.path)).is_dir():
        files = _arrow_files(_saved_dataset(folder, source), source)
    else:
        files = _matching_files(source, base_dir, excluded)
    columns = tuple(source.columns.items())
    return [
        replace(file, format=source.format, text_key=source.text_key, columns=columns, source=number) for file in files
    ]


def _matching_files(source: SourceSpec, base_dir: Path, excluded: _Excluded) -> list[SourceFile]:
    """The files that a path or a glob names."""
    names = _globbed(source.path, base_dir)
    there = _each_once([name for name in names if _is_file(base_dir / name, name)], base_dir)
    names = [name for name in there if not excluded.has(base_dir / name)]
    if there and not names:
        raise UserError(f"data.exclude leaves out every file of data source {source.path}; remove one of them")
    files = [_source_file(name, source, base_dir) for name in _without_twins(names)]
    if files and not total_bytes(files):
        raise UserError(f"data source {source.path} is empty: {names_of(files)} contains no data; remove it")
    if not files:
        regular(base_dir / os.path.expanduser(source.path))
        raise UserError(f"data source {source.path} matches no file (looked in {base_dir.resolve()})")
    return files


def _is_file(path: Path, name: str) -> bool:
    """Whether a name is a file's. Raises UserError for a link to nothing, whose text would be missing in silence."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{name}: is a link to {os.readlink(path)}, which does not exist; mend it, or remove it")
    return path.is_file()


def _each_once(names: Iterable[str], base_dir: Path) -> list[str]:
    """The names, sorted, without further names of the same file; of a file and its links the file's own name stays."""
    first: dict[tuple[int, int], str] = {}
    for name in sorted(names, key=lambda name: ((base_dir / name).absolute() != (base_dir / name).resolve(), name)):
        first.setdefault(_identity(base_dir / name), name)
    return sorted(first.values())


def _without_twins(names: Sequence[str]) -> list[str]:
    """The names without the .bin files whose .idx is also listed: together they are one source of tokens."""
    indexed = {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
    return [name for name in names if not (name.endswith(".bin") and name.removesuffix(".bin") in indexed)]


def _source_file(name: str, source: SourceSpec, base_dir: Path) -> SourceFile:
    path = base_dir / name
    compression = next((ending for ending in COMPRESSED if name.lower().endswith(ending)), "")
    ending = Path(name[: len(name) - len(compression)]).suffix.lower()
    container = CONTAINERS.get(ending, "text")
    if ending in NOT_TEXT or (compression and container not in ("text", "jsonl", "json", "csv")):
        raise UserError(
            f"{name}: {ending}{compression} files cannot be read; make it .jsonl, or plain text such as .txt"
        )
    if container == "raw" and path.with_suffix(".idx").is_file():
        container = "megatron"
    elif container == "megatron":
        path = path.with_suffix(".bin")
        if not path.is_file():
            raise UserError(f"{name}: is the index of {path.name}, which is not beside it")
    elif container == "raw" and source.tokens is None:
        raise UserError(
            f"{name}: has no {path.stem}.idx beside it; set its integer type, as in "
            f"{{path: {source.path}, tokens: uint16}}"
        )
    return SourceFile(
        path=path,
        name=name,
        container=container,
        compression=compression,
        tokens=source.tokens if container == "raw" else None,
    )


def _arrow_files(paths: Iterable[Path], source: SourceSpec) -> list[SourceFile]:
    return [SourceFile(path=path, name=f"{source.path}/{path.name}", container="arrow") for path in paths]


def _saved_dataset(folder: Path, source: SourceSpec) -> Iterator[Path]:
    """The arrow files written by `datasets.save_to_disk`: a dataset, or one split of several."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _json_object(splits).get("splits", [])
        if source.split not in names:
            raise UserError(f"data source {source.path} has no split {source.split!r} (it has {', '.join(names)})")
        folder = folder / source.split
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(f"data source {source.path} is a folder; name its files, as in {source.path}/**/*.txt")
    for file in _json_object(state).get("_data_files", []):
        yield folder / Path(file["filename"]).name


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        assert isinstance(content, dict)
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise UserError(f"{path} was not written by `datasets`: {error}") from error
    return content


def _hub_files(source: SourceSpec) -> list[Path]:
    """The arrow files in the cache of `datasets`, downloaded if missing."""
    datasets = require("datasets", f"data source {source.path}")
    try:
        dataset = datasets.load_dataset(source.path.removeprefix(HUB), source.subset, split=source.split)
    except Exception as error:  # the network, the hub and a dataset's files can fail in any way
        reason = " ".join(str(error).split())
        raise UserError(f"data source {source.path}, split {source.split}, cannot be loaded: {reason}") from error
    return [Path(file["filename"]) for file in dataset.cache_files]


def _stdlib_files(number: int) -> list[SourceFile]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - STDLIB_LEFT_OUT
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            name = f"{STDLIB}/{path.relative_to(folder).as_posix()}"
            files.append(SourceFile(path=path, name=name, container="text", source=number))
    if not files:
        raise UserError(
            f"this Python has no source files of its standard library (looked for .py files in {folder}); set "
            f"data.sources to a file or glob instead of {STDLIB}"
        )
    return sorted(files, key=lambda file: file.name)
