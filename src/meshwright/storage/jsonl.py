"""Files of JSON objects, one per line, as people write them. No torch here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for people, object) of every line that is not blank; raises `UserError` where one is no JSON object."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    # Not splitlines: a JSON text may hold U+2028, U+0085 and others that it takes for ends of lines.
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
