"""Marks around the texts of a conversation; they locate the texts in a chat template's output.

Every text of a message is enclosed in two code points that no text contains, with a number after the first. The
template copies them. Then the marks are removed. If the result equals the output without marks, their positions locate
each text. Texts are split at tags (`</think>`), because templates search for tags, and whitespace at the edges stays
outside the marks, because templates trim it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.data.sandbox import BEGIN, END

OPEN, CLOSE = "\ufdd2", "\ufdd3"
"""Around a text; a number in DIGITS follows OPEN."""
DIGITS = "\ufde0\ufde1\ufde2\ufde3\ufde4\ufde5\ufde6\ufde7\ufde8\ufde9"
RESERVED = re.compile("[\ufdd0-\ufdef]")
"""Code points that no text may contain."""
THOUGHTS = ("reasoning_content", "thinking")
"""A message's fields for the thoughts before the answer; both hold the same text, as in transformers."""
_NUMBERS = str.maketrans("0123456789", DIGITS)
_MARK = re.compile(f"[{BEGIN}{END}{CLOSE}]|{OPEN}[{DIGITS}]+")
_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]|◁[^◁▷\s]{1,20}▷)")


class Span(NamedTuple):
    """Characters `start` to `end - 1` of a text."""

    start: int
    end: int


class MarkedText(NamedTuple):
    """A marked text of a message."""

    message: int
    """Number of the message."""
    field: str
    """The message's field: content, a thought, tool_calls."""


class Region(NamedTuple):
    """The position of a message in a template's output."""

    span: Span
    """From its first text to the end of its last."""
    room: Span
    """From the end of the previous message's text to the start of the next message's."""
    before: int | None
    """The message before it in the text."""
    after: int | None
    """The message after it in the text."""
    whole: bool
    """Whether no other message's text is inside."""
    fields: frozenset[str]
    """The fields that appear in the output."""


@dataclass
class Written:
    """A template's output without marks, and the positions of the marks."""

    text: str
    places: list[tuple[Span, MarkedText]] = field(default_factory=list)
    """The first occurrence of each marked text, in the output's order."""
    generated: list[Span] = field(default_factory=list)
    """The spans marked by `{% generation %}`."""

    def gap(self, message: int) -> Region | None:
        """The position of a message without text in the output: between the texts of its neighbours."""
        ranks = [rank for rank, (_, text) in enumerate(self.places) if text.message < message]
        rank = ranks[-1] if ranks else -1
        if any(text.message < message for _, text in self.places[rank + 1 :]):
            return None
        region = self._region([rank + 1, rank])
        return region._replace(span=Span(region.room.end, region.room.end), fields=frozenset())

    @cached_property
    def regions(self) -> dict[int, Region]:
        """The region of each message in the output."""
        ranks: dict[int, list[int]] = {}
        for rank, (_, text) in enumerate(self.places):
            ranks.setdefault(text.message, []).append(rank)
        return {message: self._region(own) for message, own in ranks.items()}

    def _region(self, ranks: Sequence[int]) -> Region:
        first, last = ranks[0], ranks[-1]
        around = [self.places[rank] if 0 <= rank < len(self.places) else None for rank in (first - 1, last + 1)]
        return Region(
            span=Span(self.places[first][0].start, self.places[last][0].end) if first <= last else Span(0, 0),
            room=Span(around[0][0].end if around[0] else 0, around[1][0].start if around[1] else len(self.text)),
            before=around[0][1].message if around[0] else None,
            after=around[1][1].message if around[1] else None,
            whole=last - first + 1 == len(ranks),
            fields=frozenset(self.places[rank][1].field for rank in ranks if first <= last),
        )


class Marker:
    """Marks conversations, and reads the marks in a template's output."""

    def __init__(self, *, empty: bool, roles: Sequence[str] | None = None, special: re.Pattern[str] | None = None):
        """`empty`: mark empty texts too. `roles`: mark only messages with these roles. `special` matches special
        tokens, which are not tags."""
        self._empty, self._roles, self._special = empty, roles, special
        self._texts: list[MarkedText] = []

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with marks around their texts."""
        self._texts = []
        marked = []
        for number, message in enumerate(messages):
            if self._roles is None or message["role"] in self._roles:
                message = {**message, **self._marked_fields(message, number)}
            marked.append(dict(message))
        return marked

    def read(self, raw: str) -> Written:
        """Parse a template's output for the messages that were marked last."""
        parts, place, position = [], 0, 0
        opened: list[tuple[int, int]] = []
        starts: list[int] = []
        first: dict[int, Span] = {}
        generated = []
        for match in _MARK.finditer(raw):
            parts.append(raw[position : match.start()])
            place, position, mark = place + len(parts[-1]), match.end(), match[0]
            if mark == BEGIN:
                starts.append(place)
            elif mark == END and starts:
                generated.append(Span(starts.pop(), place))
            elif mark == CLOSE and opened:
                number, start = opened.pop()
                first.setdefault(number, Span(start, place))
            elif mark[0] == OPEN:
                opened.append((int("".join(str(DIGITS.index(digit)) for digit in mark[1:])), place))
        parts.append(raw[position:])
        places = sorted((span, self._texts[number]) for number, span in first.items() if number < len(self._texts))
        return Written("".join(parts), places, generated)

    def _marked_fields(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in ("content", *THOUGHTS):
            if isinstance(message.get(name), str):
                fields[name] = self._marked(
                    message[name], MarkedText(number, name), whole=not message.get("tool_calls")
                )
        if message.get("tool_calls"):
            fields["tool_calls"] = self._deep(message["tool_calls"], MarkedText(number, "tool_calls"))
        return fields

    def _deep(self, value: Any, text: MarkedText) -> Any:
        """Tool calls with marks around names and arguments: keys, and values that are text."""
        if isinstance(value, list):
            return [self._deep(item, text) for item in value]
        if isinstance(value, dict) and "function" in value:
            return {**value, "function": self._call(value["function"], text)}
        if isinstance(value, dict):
            # Templates may sort by keys, so the marks follow them.
            return {key + self._wrap("", text): self._deep(item, text) for key, item in value.items()}
        return self._marked(value, text) if isinstance(value, str) else value

    def _call(self, function: Mapping[str, Any], text: MarkedText) -> dict[str, Any]:
        marked = {"name": self._marked(function["name"], text)}
        return {**function, **marked, "arguments": self._deep(function.get("arguments", {}), text)}

    def _marked(self, value: str, text: MarkedText, *, whole: bool = False) -> str:
        if not value.strip():
            return value + self._wrap("", text) if self._empty and whole and text.field == "content" else value
        parts = self._parts(value)
        if not any(part.strip() and not _TAG.fullmatch(part) for part in parts):  # nothing but tags
            parts = [value]
        return "".join(self._edged(part, text, tag=bool(number % 2)) for number, part in enumerate(parts))

    def _parts(self, value: str) -> list[str]:
        """Text and tags, alternating."""
        parts: list[list[str]] = [[]]
        for number, part in enumerate(_TAG.split(value)):
            is_special = number % 2 and self._special and self._special.fullmatch(part)
            if not is_special and (number % 2 or len(parts) % 2 == 0):
                parts.append([])
            parts[-1].append(part)
        return list(map("".join, parts))

    def _edged(self, part: str, text: MarkedText, *, tag: bool) -> str:
        core = part.strip()
        if not core or tag:
            return part
        start = part.index(core)
        return part[:start] + self._wrap(core, text) + part[start + len(core) :]

    def _wrap(self, core: str, text: MarkedText) -> str:
        self._texts.append(text)
        return f"{OPEN}{str(len(self._texts) - 1).translate(_NUMBERS)}{core}{CLOSE}"
