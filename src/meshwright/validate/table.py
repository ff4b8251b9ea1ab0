"""A table of published runs as a file: header, lines, and errors in them."""

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.validate.doubts import COLUMNS, Doubt, cell_doubts
from meshwright.validate.rows import PublishedRun, read_row

NEEDED = ("id", "source", "gpu", "gpus")
"""Columns that such a table must have; their cells may be empty."""
DELIMITERS = ",;\t"


@dataclass(frozen=True)
class Table:
    """A table as read, without loss."""

    runs: list[PublishedRun]
    """Rows that can be predicted."""
    refused: dict[str, str]
    """id -> reason for rows that cannot be predicted."""
    doubts: list[Doubt]
    """Cells that were not understood or contradict others, and the values used instead."""


def read_table(path: Path) -> Table:
    """A file of comma-, semicolon- or tab-separated values. Raises `UserError` if it has no rows or lacks a required
    column; no cell makes it fail."""
    raw = regular(path).read_bytes()
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as spreadsheets save "Unicode text"
    text = raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    delimiter = max(DELIMITERS, key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise UserError(
            f"{path} has no columns id, source, gpu and gpus: it is not a table of published runs; "
            f"missing in its first line: {', '.join(missing)}"
        )
    if not rows:
        raise UserError(f"{path} has a header and no row: there is no run to predict")
    table = Table([], {}, list(_header_doubts(header)))
    seen: set[str] = set()
    for line, row in rows:
        _add(table, line, row, seen)
    return table


def _add(table: Table, line: int, cells: dict, seen: set[str]) -> None:
    """One row into the table."""
    row: dict[str, str] = {key: value for key, value in cells.items() if isinstance(key, str)}
    id = (row["id"] or "").strip() or f"line {line}"
    row["id"] = id

    def doubt(column: str, value: str, made: str) -> None:
        table.doubts.append(Doubt(line, id, column, value, made))

    if id in seen:
        doubt("id", id, "an earlier row has the same; both are predicted")
    if None in cells:
        doubt(
            "", "", f"cells beyond the header's: {len(cells[None])}; a separator inside a cell shifts those behind it"
        )
    elif None in row.values():
        doubt("", "", f"cells missing at the end: {sum(value is None for value in row.values())}; treated as empty")
    for column, value in row.items():
        if "\n" in (value or ""):
            doubt(column, value, "holds line breaks: is a quotation mark not closed? What follows may be rows")
    try:
        run = read_row(row)
    except ValueError as error:
        table.refused[id if id not in table.refused else f"{id} (line {line})"] = str(error)
        doubt("", "", f"not predictable: {error}")
    else:
        table.runs.append(run)
        table.doubts.extend(Doubt(line, id, *doubt) for doubt in cell_doubts(row, run))
    seen.add(id)


def _header_doubts(header: list[str]) -> Iterator[Doubt]:
    for name in header:
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, 1)
            yield Doubt(1, "", name, "", "a column that is not read" + (f"; is {near[0]} meant?" if near else ""))
