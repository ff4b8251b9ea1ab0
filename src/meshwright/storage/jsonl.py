"""Files of JSON objects, one per line, written by users. No torch here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of every line that is not blank; raises `UserError` if one is not a JSON object."""
    try:
        text = regular(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    # Not splitlines, which also splits at U+2028, U+0085 and others that a JSON text may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: is not a JSON object")
        yield f"{path}:{number}", row
