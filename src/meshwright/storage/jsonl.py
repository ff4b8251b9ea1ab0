"""JSON written by users: a text, and files with an object on each line. No torch here."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. An object with a repeated key is refused: Python would silently take its last value.

    Raises `UserError`; the message starts with `where`.
    """
    try:
        return _DECODER.decode(text)
    except UserError as error:
        if "\n" not in text.strip():
            raise UserError(f"{where}: {error}") from None
        what = str(error).removeprefix("an object")
        raise UserError(f"{where}:{_line_of_repetition(text)}: the object that ends here{what}") from None
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: its JSON is nested too deeply") from error


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of every line that is not blank; raises `UserError` if one is not a JSON object."""
    for number, row in read_values(path):
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: is not a JSON object")
        yield f"{path}:{number}", row


def read_values(path: Path) -> Iterator[tuple[int, Any]]:
    """(its number, value) of every line that is not blank; raises `UserError` if one is not JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    # Not splitlines, which also splits at U+2028, U+0085 and others that a JSON text may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = parse_json(line, f"{path}:{number}")
            if "\\ud" in line.lower():
                _check_unicode(value, f"{path}:{number}")
            yield number, value


def _check_unicode(value: Any, where: str) -> None:
    """Raise `UserError` if a text in a value has half of a surrogate pair, which is no character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: is not JSON ({error})") from error


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; raises `UserError` if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise UserError(f"an object has the key {twice!r} twice; remove or rename one")
    return fields


def _line_of_repetition(text: str) -> int:
    """The line on which the first object with a repeated key ends."""
    closed = 0

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal closed
        closed += 1
        return distinct_keys(pairs)

    with suppress(UserError):
        json.loads(text, object_pairs_hook=count)
    ends = (match.end() for match in _STRING_OR_END.finditer(text) if match[0] == "}")
    return text.count("\n", 0, next(islice(ends, closed - 1, None))) + 1


_STRING_OR_END = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|\}')
_DECODER = json.JSONDecoder(object_pairs_hook=distinct_keys)
