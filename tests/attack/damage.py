"""Damage to files: flipped bits, cuts, holes, extra bytes, swaps, things that are no file, unexpected JSON values."""

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], str]
"""Changes a file and returns a description."""


def flip(path: Path, draw: random.Random, *, at: float | None = None, within: int | None = None) -> str:
    """One bit flipped, among the first `within` bytes: any, or the lowest of the byte at the fraction `at`."""
    data = bytearray(path.read_bytes())
    size = min(len(data), within or len(data))
    place = draw.randrange(8 * size) if at is None else 8 * min(size - 1, int(at * size))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return f"bit {place} of {8 * len(data)} flipped"


def cut(path: Path, draw: random.Random) -> str:
    """The end removed, as after a crash."""
    kept = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(kept)
    return f"cut to {kept} bytes"


def hole(path: Path, draw: random.Random) -> str:
    """A block of zeros, as from a file system that lost it; not where there are only zeros."""
    data = bytearray(path.read_bytes())
    begin = end = 0
    for _ in range(100):
        begin = draw.randrange(len(data))
        end = min(len(data), begin + draw.choice((1, 16, 512, 4096)))
        if any(data[begin:end]):
            break
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    return f"bytes {begin} to {end} zeroed"


def grow(path: Path, draw: random.Random) -> str:
    """Random bytes appended."""
    extra = draw.randbytes(draw.choice((1, 7, 4096)))
    with path.open("ab") as file:
        file.write(extra)
    return f"{len(extra)} bytes appended"


def empty(path: Path, draw: random.Random) -> str:
    """An empty file."""
    path.write_bytes(b"")
    return "emptied"


def remove(path: Path, draw: random.Random) -> str:
    """The file deleted."""
    path.unlink()
    return "removed"


def scramble(path: Path, draw: random.Random) -> str:
    """Two different blocks swapped: the same bytes in another order."""
    data = bytearray(path.read_bytes())
    size = max(1, min(64, len(data) // 4))
    one = other = 0
    for _ in range(100):
        one, other = sorted(draw.sample(range(0, len(data) - size + 1, size), 2)) if len(data) >= 2 * size else (0, 0)
        if data[one : one + size] != data[other : other + size]:
            break
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]
    path.write_bytes(data)
    return f"{size} bytes at {one} and {other} exchanged"


def replace(path: Path, draw: random.Random, *, by: Callable[[Path], object], what: str) -> str:
    """Something that is no file in its place."""
    path.unlink()
    by(path)
    return f"replaced by {what}"


BYTES: Mapping[str, Damage] = {
    "first bit": partial(flip, at=0.0),
    "bit at 1/3": partial(flip, at=1 / 3),
    "bit at 2/3": partial(flip, at=2 / 3),
    "last bit": partial(flip, at=1.0),
    "any bit": flip,
    "cut": cut,
    "hole": hole,
    "longer": grow,
    "empty": empty,
    "missing": remove,
    "exchanged": scramble,
    "pipe": partial(replace, by=os.mkfifo, what="a pipe"),
    "device": partial(replace, by=lambda path: path.symlink_to("/dev/zero"), what="/dev/zero"),
    "folder": partial(replace, by=Path.mkdir, what="a folder"),
}
"""Damage to any file."""
CONTENT = frozenset({"first bit", "bit at 1/3", "bit at 2/3", "last bit", "any bit", "hole", "exchanged"})
"""Those that leave the file as long as it was."""


def header(path: Path, draw: random.Random, *, at: float | None = None) -> str:
    """One bit of a safetensors file's header or of its length flipped."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return flip(path, draw, at=at, within=8 + length)


HEADER: Mapping[str, Damage] = {
    "length": partial(header, at=0.0),
    "middle of header": partial(header, at=0.5),
    "end of header": partial(header, at=1.0),
    "any bit of header": header,
}
"""Damage to the header of a safetensors file, whose tensors have no checksum."""

ABSURD: Sequence[Any] = (
    None, True, 0, -1, 1, 3, 10**9, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "a", "1", "../../x",
    "\x1b[31m", "é\u202e", [], [0], ["a"], [[]], [None], {}, {"a": 1}, {"": {}}, "x" * 10_000, "{{ 1/0 }}",
    "{% for i in range(10**9) %}{% endfor %}",
)  # fmt: skip
"""Values that few keys, or none, expect."""


def absurd(path: Path, draw: random.Random, *, values: Sequence[Any] = ABSURD) -> str:
    """One value at any place of a JSON file replaced by one that does not belong there."""
    tree = json.loads(path.read_text())
    where, key = draw.choice(list(_places(tree)))
    was = where[key]
    where[key] = draw.choice(values)
    path.write_text(json.dumps(tree))
    return f"{key!r}: {str(where[key])[:40]!r} instead of {str(was)[:40]!r}"


def without(path: Path, draw: random.Random) -> str:
    """One key of a JSON file removed."""
    tree = json.loads(path.read_text())
    where, key = draw.choice([(where, key) for where, key in _places(tree) if isinstance(where, dict)])
    del where[key]
    path.write_text(json.dumps(tree))
    return f"{key!r} removed"


JSON: Mapping[str, Damage] = {
    "odd value": absurd,
    "huge value": partial(absurd, values=(10**9, 10**30, 1e308)),
    "wrong sign": partial(absurd, values=(-1, -1e308)),
    "not a number": partial(absurd, values=(float("nan"), float("inf"))),
    "no key": without,
}
"""Damage to a JSON object that stays JSON."""
ALL: Mapping[str, Damage] = {**BYTES, **HEADER, **JSON}


def _places(tree: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key) of every value down to the third level, and of a few of a long list."""
    if depth > 3 or not isinstance(tree, (dict, list)) or not tree:
        return []
    keys = list(tree) if isinstance(tree, dict) else [*range(min(3, len(tree)))]
    return [place for key in keys for place in [(tree, key), *_places(tree[key], depth + 1)]]
