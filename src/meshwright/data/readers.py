"""Readers: the documents of a corpus's files, in any supported format."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple

from meshwright.data.records import COLUMNS, FURTHER, MEDIA, Content, format_of, record_content, refuse, renamed
from meshwright.data.sources import SourceFile, require
from meshwright.data.structs import read_row, readers_of
from meshwright.spec.errors import UserError
from meshwright.spec.text import quoted
from meshwright.storage.jsonl import parse_json

ROWS = 256
"""Rows of a table in memory at a time."""
LONGEST = 1 << 28
"""Bytes of a line, of a field of a .csv file, and of a file that is read whole; a document is held in memory whole."""
CHUNK = 1 << 20
"""Bytes of such a file read at a time."""
MOST_UNPACKED = 250
"""Largest ratio of unpacked to packed size, after the first line's worth; text compresses 3 to 20 times."""


UNDECODABLE = "undecodable"
"""The note of what is skipped because it is not UTF-8."""
OF_A_LINE = " of the line; convert the file, or skip such lines: data.undecodable=skip"
"""The end of the message about a line that is not UTF-8."""


class Document(NamedTuple):
    """One document of a corpus."""

    id: str
    """The file's name, with the line or row if it holds several documents."""
    text: str
    """The text, never empty; for a record, the JSON text of `records.py`."""
    num_bytes: int
    """Its size in the file, in bytes."""
    record: int = 1
    """Line or row of its file, from 1; in a .csv file the header is not counted."""
    note: str = ""
    """`structs` if keys that were null in a struct are left out; `undecodable` if it is skipped, and has no text."""


class Row(NamedTuple):
    """One line or row of a file with several documents."""

    id: str
    fields: Mapping[str, Any]
    """By key or column: for text only the text column, for records at least the columns that they need."""
    num_bytes: int
    record: int
    decoded: bool = True
    """False for a line that is skipped because it is not UTF-8; it has no fields."""


def read_documents(files: Iterable[SourceFile]) -> Iterator[Document]:
    """The documents of these files, in order, a few in memory at a time; empty ones are left out.

    Raises UserError, naming file and byte, line or row, for unreadable files and for text that is not UTF-8, unless it
    is skipped.
    """
    return (document for document in read_all(files) if document.text)


def read_all(files: Iterable[SourceFile], *, skip: int = 0) -> Iterator[Document]:
    """As `read_documents`, with what is skipped because it is not UTF-8.

    The first `skip` records (lines or rows) of the first file are skipped, which is much faster than reading them.
    """
    for file in map(_told_apart, files):
        if file.container == "text":
            documents = _read_text(file, skip)
        else:
            documents = (
                Document(row.id, content.text, row.num_bytes, row.record, content.note)
                for row in _READERS[file.container](file, skip)
                for content in [_content(row, file) if row.decoded else Content("", UNDECODABLE)]
            )
        yield from (document for document in documents if document.text or document.note == UNDECODABLE)
        skip = 0


def told_apart(files: Iterable[SourceFile]) -> list[SourceFile]:
    """The files with their formats; a format that the source leaves open is detected from the first record's columns.

    Raises UserError if the columns match several formats, or nearly match one.
    """
    return [_told_apart(file) for file in files]


def _told_apart(file: SourceFile) -> SourceFile:
    if file.format != "auto":
        return file
    if file.container not in _READERS or file.text_key != "text":
        return replace(file, format="text")
    row = next((row for row in _READERS[file.container](file, 0) if row.decoded), None)
    return replace(
        file, format=format_of(renamed(row.fields, file.columns), file.text_key, file.name) if row else "text"
    )


def _content(row: Row, file: SourceFile) -> Content:
    if file.is_records:
        return record_content(renamed(row.fields, file.columns), file.format, row.id)
    fields = renamed(row.fields, file.columns)
    key, text = file.text_key, fields.get(file.text_key)
    if key not in fields:
        raise UserError(f"{row.id}: has no {key!r} (its keys are {', '.join(fields)}); set the source's text_key")
    refuse(fields, MEDIA, row.id)
    if not isinstance(text, str):
        kind = "empty (null)" if text is None else f"not a string but {type(text).__name__}"
        raise UserError(f"{row.id}: {key!r} is {kind}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{row.id}: {key!r} is not Unicode text: a lone surrogate at character {error.start}"
        ) from error
    return Content(text)


def _read_text(file: SourceFile, skip: int) -> Iterator[Document]:
    if skip:
        return
    with _opened(file) as (opened, raw):
        content = _whole(opened, file)
        num_bytes = raw.tell()
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if file.skips:
            yield Document(file.name, "", num_bytes, note=UNDECODABLE)
            return
        left_out = quoted(f"data.exclude={json.dumps([file.name], ensure_ascii=False)}")
        raise UserError(
            f"{file.name}: is not UTF-8 at byte {error.start}; convert it (iconv -f LATIN1 -t UTF-8), skip all "
            f"such files (data.undecodable=skip), or leave it out: {left_out}"
        ) from error
    yield Document(file.name, text, num_bytes)


def _read_json_lines(file: SourceFile, skip: int) -> Iterator[Row]:
    place = 0
    with _opened(file) as (lines, raw):
        unpacked = 0
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), start=1):
            unpacked += len(line)
            if len(line) > LONGEST:
                raise UserError(f"{file.name}:{number}: the line is longer than {LONGEST} bytes; split it into several")
            if file.compression and unpacked > LONGEST + MOST_UNPACKED * raw.tell():
                raise UserError(f"{file.name}:{number}: unpacks to more than {MOST_UNPACKED} times its size")
            if number == skip:
                place = raw.tell()
            if number <= skip or not line.strip():
                continue
            before, place = place, raw.tell()
            where = f"{file.name}:{number}"
            decoded = not file.skips or _is_utf8(line)
            fields = _fields(_parsed(line, where, OF_A_LINE), where) if decoded else {}
            yield Row(where, fields, place - before, number, decoded)


def _read_json(file: SourceFile, skip: int) -> Iterator[Row]:
    """A list of records, all in memory."""
    with _opened(file) as (opened, raw):
        content = _whole(opened, file)
        num_bytes = raw.tell()
    records = _parsed(content, file.name, "")
    if not isinstance(records, list):
        raise UserError(f"{file.name}: a .json file must contain a list of records")
    for number, record in enumerate(records, start=1):
        if number > skip:
            share = num_bytes * number // len(records) - num_bytes * (number - 1) // len(records)
            where = f"{file.name}: record {number}"
            yield Row(where, _fields(record, where), share, number)


def _read_csv(file: SourceFile, skip: int) -> Iterator[Row]:
    csv.field_size_limit(LONGEST)
    place = 0
    with _opened(file) as (opened, raw), io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, strict=True)
        try:
            names = next(rows, [])
            _check_columns(file, names)
            for number, row in enumerate(rows, start=1):
                if number <= skip or not row:
                    continue
                before, place = place, raw.tell()
                where = f"{file.name}:{rows.line_num}"
                if len(row) != len(names):
                    raise UserError(f"{where}: {len(row)} fields, but the header has {len(names)}")
                yield Row(where, dict(zip(names, row, strict=True)), place - before, number)
        except csv.Error as error:
            raise UserError(f"{file.name}:{rows.line_num}: not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{file.name}: is not UTF-8 shortly after line {rows.line_num}") from error


def _read_parquet(file: SourceFile, skip: int) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", f"reading {file.name}")
    with _arrow_errors(file), parquet.ParquetFile(file.path) as opened:
        columns = _columns(file, opened.schema_arrow.names)
        share = file.path.stat().st_size / max(1, opened.metadata.num_rows)
        groups, row = list(range(opened.num_row_groups)), 0
        while groups and row + opened.metadata.row_group(groups[0]).num_rows <= skip:
            row += opened.metadata.row_group(groups.pop(0)).num_rows
        batches = opened.iter_batches(batch_size=ROWS, row_groups=groups, columns=columns)
        yield from _rows(file, batches, row, skip, share)


def _read_arrow(file: SourceFile, skip: int) -> Iterator[Row]:
    arrow = require("pyarrow", f"reading {file.name}")
    with _arrow_errors(file), arrow.memory_map(str(file.path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            opened = arrow.ipc.open_file(mapped)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            mapped.seek(0)
            batches = opened = arrow.ipc.open_stream(mapped)
        columns = _columns(file, opened.schema.names)
        pieces = (
            batch.select(columns).slice(start, ROWS) for batch in batches for start in range(0, batch.num_rows, ROWS)
        )
        yield from _rows(file, pieces, 0, skip, None)


def _rows(file: SourceFile, batches: Iterable[Any], row: int, skip: int, share: float | None) -> Iterator[Row]:
    """Rows of record batches; `row` rows precede the first batch."""
    for batch in batches:
        readers = readers_of(batch.schema, file.name)
        if row + batch.num_rows > skip:
            # A slice counts only the bytes of its own rows.
            each = batch.nbytes / max(1, batch.num_rows) if share is None else share
            for number, fields in enumerate(batch.to_pylist(), start=row + 1):
                if number > skip:
                    where, num_bytes = f"{file.name}: row {number}", int(each * number) - int(each * (number - 1))
                    yield Row(where, read_row(fields, readers, where), num_bytes, number)
        row += batch.num_rows


def _columns(file: SourceFile, names: Sequence[str]) -> list[str]:
    """The columns that are read."""
    _check_columns(file, names)
    if file.format == "auto":
        return list(names)
    wanted = {*COLUMNS[file.format], *FURTHER} if file.is_records else {file.text_key, *MEDIA}
    wanted |= {theirs for _, theirs in file.columns if theirs}
    wanted -= {ours for ours, theirs in file.columns if theirs is None}
    return [name for name in names if name in wanted]


def _check_columns(file: SourceFile, names: Sequence[str]) -> None:
    """Check that no name occurs twice, and that a text file has its text column. Records are checked when read."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file.name}: two columns are named {twice!r}; rename or remove one")
    if file.format == "text" and file.text_key not in names:
        raise UserError(
            f"{file.name}: no column {file.text_key!r} (its columns are {', '.join(names)}); set the source's text_key"
        )


def _up_to(opened: IO[bytes], most: int) -> bytes:
    """At most this many bytes. A single `read` would allocate that much memory first, even for a short file."""
    parts, left = list[bytes](), most
    while left and (part := opened.read(min(left, CHUNK))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _whole(opened: IO[bytes], file: SourceFile) -> bytes:
    content = _up_to(opened, LONGEST + 1)
    if len(content) > LONGEST:
        raise UserError(f"{file.name}: a single block is larger than {LONGEST} bytes; split the file, or use .jsonl")
    return content


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content as a stream, and the stream of the bytes on disk, whose position gives the progress."""
    try:
        raw = file.path.open("rb")
    except OSError as error:
        raise UserError(f"{file.name} cannot be read: {error.strerror}") from error
    with raw:
        if not file.compression:
            yield raw, raw
            return
        damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        if file.compression == ".gz":
            stream: Any = gzip.GzipFile(fileobj=raw, mode="rb")
        else:
            arrow = require("pyarrow", f"reading {file.name}")
            damage = (OSError, EOFError)
            stream = io.BufferedReader(arrow.CompressedInputStream(raw, "zstd"), 1 << 20)
        try:
            yield stream, raw
        except damage as error:
            place = "" if raw.closed else f" near byte {raw.tell()}"
            raise UserError(f"{file.name} is damaged{place}: {' '.join(str(error).split())}") from error


@contextmanager
def _arrow_errors(file: SourceFile) -> Iterator[None]:
    arrow = require("pyarrow", f"reading {file.name}")
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file.name} cannot be read: {reason}") from error


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parsed(content: bytes, where: str, hint: str) -> Any:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}{hint}") from error
    return parse_json(text, where)


def _fields(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object, but {type(value).__name__}")
    return value


_READERS = {
    "jsonl": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
