"""Marks around the texts of a conversation, which show where a chat template has put them.

Every text of a message is written between two code points that no text has, with a number after the first. A template
copies them along. What it wrote is then read with the marks taken out; if that equals what it writes without marks,
the marks say where each text stands. Texts are cut at tags (`</think>`), because templates look for those, and white
space at the edges stays outside, because templates trim it.
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
"""Code points that no text may have."""
THOUGHTS = ("reasoning_content", "thinking")
"""A message's fields for what was thought before the answer; both hold the same text, as transformers fills them."""
_NUMBERS = str.maketrans("0123456789", DIGITS)
_MARK = re.compile(f"[{BEGIN}{END}{CLOSE}]|{OPEN}[{DIGITS}]+")
_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]|◁[^◁▷\s]{1,20}▷)")


class Span(NamedTuple):
    """Characters `start` to `end - 1` of a text."""

    start: int
    end: int


class Text(NamedTuple):
    """A marked text of a message."""

    message: int
    """Number of the message."""
    field: str
    """Which of its fields: content, a thought, tool_calls."""


class Region(NamedTuple):
    """Where a message stands in what a template wrote."""

    span: Span
    """From its first text to the end of its last."""
    room: Span
    """From the end of the text before to the start of the text behind, which other messages wrote."""
    before: int | None
    """The message whose text stands before it."""
    after: int | None
    """The message whose text stands behind it."""
    whole: bool
    """Whether no other message's text stands inside."""
    fields: frozenset[str]
    """Which of its fields have been written."""


@dataclass
class Written:
    """What a template has written, read without marks."""

    text: str
    places: list[tuple[Span, Text]] = field(default_factory=list)
    """Where each marked text first stands, in the text's order."""
    generated: list[Span] = field(default_factory=list)
    """What `{% generation %}` marks."""

    def gap(self, message: int) -> Region | None:
        """Where a message would stand of which no text has been written: between the texts of those around it."""
        ranks = [rank for rank, (_, text) in enumerate(self.places) if text.message < message]
        rank = ranks[-1] if ranks else -1
        if any(text.message < message for _, text in self.places[rank + 1 :]):
            return None
        found = self._region([rank + 1, rank])
        return found._replace(span=Span(found.room.end, found.room.end), fields=frozenset())

    @cached_property
    def regions(self) -> dict[int, Region]:
        """Of each message that has been written: where, and up to which other texts."""
        ranks: dict[int, list[int]] = {}
        for rank, (_, text) in enumerate(self.places):
            ranks.setdefault(text.message, []).append(rank)
        return {message: self._region(found) for message, found in ranks.items()}

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
    """Marks conversations, and reads what a template made of them."""

    def __init__(self, *, empty: bool, roles: Sequence[str] | None = None, special: re.Pattern[str] | None = None):
        """`empty`: texts of nothing are marked, too. `roles`: only the messages of these. `special` finds special
        tokens, which are no tags."""
        self._empty, self._roles, self._special = empty, roles, special
        self._texts: list[Text] = []

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
        """What a template wrote of the messages that were marked last."""
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
                fields[name] = self._marked(message[name], Text(number, name), whole=not message.get("tool_calls"))
        if message.get("tool_calls"):
            fields["tool_calls"] = self._deep(message["tool_calls"], Text(number, "tool_calls"))
        return fields

    def _deep(self, value: Any, text: Text) -> Any:
        """Calls with marks around names and arguments: keys, and values that are text."""
        if isinstance(value, list):
            return [self._deep(item, text) for item in value]
        if isinstance(value, dict) and "function" in value:
            return {**value, "function": self._call(value["function"], text)}
        if isinstance(value, dict):
            # Templates may sort by keys, so their marks stand behind them.
            return {key + self._wrap("", text): self._deep(item, text) for key, item in value.items()}
        return self._marked(value, text) if isinstance(value, str) else value

    def _call(self, function: Mapping[str, Any], text: Text) -> dict[str, Any]:
        marked = {"name": self._marked(function["name"], text)}
        return {**function, **marked, "arguments": self._deep(function.get("arguments", {}), text)}

    def _marked(self, value: str, text: Text, *, whole: bool = False) -> str:
        if not value.strip():
            return value + self._wrap("", text) if self._empty and whole and text.field == "content" else value
        parts = self._parts(value)
        if not any(part.strip() and not _TAG.fullmatch(part) for part in parts):  # nothing but tags
            parts = [value]
        return "".join(self._edged(part, text, tag=bool(number % 2)) for number, part in enumerate(parts))

    def _parts(self, value: str) -> list[str]:
        """Text and tags by turns."""
        parts = [""]
        for number, part in enumerate(_TAG.split(value)):
            if number % 2 and self._special and self._special.fullmatch(part):
                parts[-1] += part
            elif number % 2 or len(parts) % 2 == 0:
                parts.append(part)
            else:
                parts[-1] += part
        return parts

    def _edged(self, part: str, text: Text, *, tag: bool) -> str:
        core = part.strip()
        if not core or tag:
            return part
        start = part.index(core)
        return part[:start] + self._wrap(core, text) + part[start + len(core) :]

    def _wrap(self, core: str, text: Text) -> str:
        self._texts.append(text)
        return f"{OPEN}{str(len(self._texts) - 1).translate(_NUMBERS)}{core}{CLOSE}"
