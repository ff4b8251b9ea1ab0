"""Damage to files: flipped bits, cuts, holes, extra bytes, swaps, and unexpected values in a JSON file."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], str]
"""Changes a file and returns a description."""


def flip(path: Path, draw: random.Random, *, within: int | None = None) -> str:
    """One bit flipped, among the first `within` bytes."""
    data = bytearray(path.read_bytes())
    place = draw.randrange(8 * min(len(data), within or len(data)))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return f"bit {place} flipped"


def cut(path: Path, draw: random.Random) -> str:
    """The end removed, as after a crash."""
    kept = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(kept)
    return f"cut to {kept} bytes"


def hole(path: Path, draw: random.Random) -> str:
    """A block of zeros, as from a file system that lost it."""
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((1, 16, 512, 4096)))
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
    """Two blocks swapped: the same bytes in another order."""
    data = bytearray(path.read_bytes())
    size = max(1, min(64, len(data) // 4))
    one, other = sorted(draw.sample(range(0, len(data) - size + 1, size), 2)) if len(data) >= 2 * size else (0, 0)
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]
    path.write_bytes(data)
    return f"{size} bytes at {one} and {other} exchanged"


ANY: Sequence[Damage] = (flip, flip, flip, cut, hole, grow, empty, remove, scramble)


def header(path: Path, draw: random.Random) -> str:
    """One bit of a safetensors file's header or of its length flipped."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return flip(path, draw, within=8 + length)


ABSURD: Sequence[Any] = (
    None, True, 0, -1, 1, 3, 10**9, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "a", "1", "../../x",
    "\x1b[31m", "é\u202e", [], [0], ["a"], [[]], [None], {}, {"a": 1}, {"": {}}, "x" * 10_000, "{{ 1/0 }}",
    "{% for i in range(10**9) %}{% endfor %}",
)  # fmt: skip
"""Values that few keys, or none, expect."""


def absurd(path: Path, draw: random.Random) -> str:
    """One value at any place of a JSON file replaced by one that does not belong there, or one key removed."""
    tree = json.loads(path.read_text())
    places = list(_places(tree))
    where, key = draw.choice(places)
    was = where[key]
    if draw.random() < 0.1 and isinstance(where, dict):
        del where[key]
        told = f"{key!r} removed"
    else:
        where[key] = draw.choice(ABSURD)
        told = f"{key!r}: {str(where[key])[:40]!r} instead of {str(was)[:40]!r}"
    path.write_text(json.dumps(tree))
    return told


def _places(tree: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key) of every value down to the third level, and of a few of a long list."""
    if depth > 3 or not isinstance(tree, (dict, list)) or not tree:
        return []
    keys = list(tree) if isinstance(tree, dict) else [*range(min(3, len(tree)))]
    return [place for key in keys for place in [(tree, key), *_places(tree[key], depth + 1)]]
