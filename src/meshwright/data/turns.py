"""The search for the text that a chat template wrote for each message of a conversation.

An assistant's turn starts after the generation prompt and ends with the token that ends its turn. A template states
neither explicitly. So the conversation is rendered with markers around its texts, which locates each message's own
text. The text between two messages is then split at the boundary of their turns: rendering the messages before a turn
with a generation prompt gives its start; rendering the messages up to it gives its end. Each kind of boundary is split
once and remembered, so a conversation of any length costs two renderings.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.marks import Marker, Region, Span, Written
from meshwright.data.tokenizer import any_of
from meshwright.spec.errors import UserError

Message = Mapping[str, Any]
"""`role`, `content` and any other field that a template uses."""
Write = Callable[[Sequence[Message], bool], str]
"""Renders messages by a template; with the generation prompt if the flag is set."""

KEPT = 1 << 14
"""Number of remembered splits."""
ANGLED = re.compile(r"<[^<>\s]{1,60}>")
"""Text that looks like a tag or a special token."""


class Turn(NamedTuple):
    """The text of one message: characters of the conversation."""

    parts: tuple[Span, ...]
    """One, or as many as the template marks by `{% generation %}`."""
    end: int
    """The end of the last part without the token that ends the turn."""


class Conversation(NamedTuple):
    """A rendered conversation."""

    text: str
    turns: dict[int, Turn]
    """Turns by message number."""
    texts: list[Span]
    """The messages' own texts, where markers locate them."""


class TurnFinder:
    """Finds turns in the output of one template."""

    def __init__(self, specials: Sequence[str]):
        """`specials` are the special tokens of the tokenizer."""
        self._special = any_of(specials)
        self._splits: dict[tuple[Any, ...], int] = {}
        self._behind: dict[Any, set[str]] = {}

    def find(self, messages: Sequence[Message], write: Write, wanted: Collection[int]) -> Conversation:
        """The conversation, and the turns of the messages `wanted`. Raises UserError if they cannot be located."""
        plain = Marker(empty=False, roles=()).read(write(messages, False))
        marker, written = self._written(messages, write, plain)
        if marker is None or written is None:
            _check_nothing_left_out(messages, plain.text)
            raise UserError(REWRITTEN)
        _check_written(messages, written, wanted)
        texts = [span for span, _ in written.places]
        search = _Search(self, marker, messages, write, written)
        return Conversation(written.text, {number: search.turn(number) for number in sorted(wanted)}, texts)

    def _written(
        self, messages: Sequence[Message], write: Write, plain: Written
    ) -> tuple[Marker | None, Written | None]:
        """The first way to mark the messages that does not change the template's output."""
        for empty, roles in ((True, None), (False, None), (False, ("assistant",))):
            marker = Marker(empty=empty, roles=roles, special=self._special)
            try:
                written = marker.read(write(marker.mark(messages), False))
            except UserError:  # a template may look at contents
                continue
            if written.text == plain.text and len(written.generated) == len(plain.generated):
                return marker, written
        return None, None

    def split(self, key: tuple[Any, ...], find: Callable[[], int]) -> int:
        """A split remembered under `key`, or found now."""
        if key not in self._splits:
            if len(self._splits) >= KEPT:
                self._splits.clear()
            self._splits[key] = find()
        return self._splits[key]

    def end_known(self, key: Any, gap: str) -> int | None:
        """The end of a turn in `gap`, given the start of the next turn; None if that is not known yet."""
        behind = max((known for known in self._behind.get(key, ()) if gap.endswith(known)), key=len, default=None)
        if behind is None:
            return None
        end = len(gap) - len(behind)
        return end if self.token_before(gap, end) else None

    def learn_end(self, key: Any, gap: str, end: int) -> None:
        """Remember the start of the next turn."""
        known = self._behind.setdefault(key, set())
        if self.token_before(gap, end) and len(known) < 64:
            known.add(gap[end:])

    def common(self, one: str, other: str) -> int:
        """Length of the common prefix of both texts, in whole special tokens."""
        end = _common_prefix(one, other)
        for text in (one, other):
            for pattern in (self._special, ANGLED):
                for match in pattern.finditer(text, 0, min(len(text), end + 64)):
                    if match.start() < end < match.end():
                        end = match.start()
        return end

    def token_at(self, text: str, start: int) -> int | None:
        """The end of a special token that starts at `start`, or after whitespace there."""
        start += len(text[start:]) - len(text[start:].lstrip())
        match = self._special.match(text, start)
        return match.end() if match else None

    def token_before(self, text: str, end: int) -> str:
        """The special token that ends at `end`, or nothing."""
        return next((match[0] for match in self._special.finditer(text, 0, end) if match.end() == end), "")

    def last_token(self, text: str) -> int | None:
        """The position of a text's last special token, if only whitespace follows it."""
        end = len(text.rstrip())
        return end if self.token_before(text, end) else None


REWRITTEN = (
    "changes or omits parts of an assistant's turn once other turns follow, so the turn's tokens cannot be located; "
    "set data.chat.train_on=last, or mark the turn with {% generation %} in the template"
)


class _Search:
    """The search for turns in one conversation."""

    def __init__(self, finder: TurnFinder, marker: Marker, messages: Sequence[Message], write: Write, written: Written):
        self.finder, self.marker, self.messages, self.write, self.written = finder, marker, messages, write, written

    def turn(self, number: int) -> Turn:
        """The turn of a message."""
        region = self.written.regions.get(number) or self.written.gap(number)
        if region is None or not region.whole:
            raise UserError(REWRITTEN)
        if self.messages[number]["role"] != "assistant":
            return self._turn((Span(region.span.start, region.span.end + self._end(number, region)),))
        parts = tuple(span for span in self.written.generated if _meet(span, region.room))
        if self.written.generated:
            if not parts:
                raise UserError(f"does not mark message {number + 1} with {{% generation %}}")
            return self._turn(parts)
        start = region.room.start + self._start(number, region)
        if not region.fields:
            region = region._replace(span=Span(start, start))
        return self._turn((Span(start, region.span.end + self._end(number, region)),))

    def _turn(self, parts: tuple[Span, ...]) -> Turn:
        start, end = parts[-1]
        text = self.written.text[start:end]
        token = self.finder.token_before(text, len(text.rstrip()))
        return Turn(parts, start + len(text.rstrip()) - len(token) if token else end)

    def _start(self, number: int, region: Region) -> int:
        """Characters between the text before and the turn."""
        gap = self.written.text[region.room.start : region.span.start]
        before = None if region.before is None else self.messages[region.before]["role"]

        def find() -> int:
            ends = (self._start_after(self.messages[:number], gap), self._start_prompted(number, gap))
            starts = [end for end in ends if end is not None]
            if not starts:
                raise UserError(REWRITTEN)
            return max(starts)  # some templates prompt only after a question

        return self.finder.split(("start", before, gap), find)

    def _start_after(self, before: Sequence[Message], gap: str) -> int | None:
        """The start of a turn in `gap`, found with this conversation's generation prompt: all of the prompt, or the
        part that the template still writes when an answer follows."""
        try:
            plain, prompted = self._tail(before), self._tail(before, answer=True)
        except UserError:  # many templates want a question first
            return None
        end = self.finder.common(prompted, gap)
        closed = self.finder.common(plain, prompted)
        whole = end == len(prompted) or (end == len(gap) and end >= closed)
        return end if whole or (prompted[closed:end].strip() and not _begins_word(gap[end:])) else None

    def _start_prompted(self, number: int, gap: str) -> int | None:
        """The start of a turn in `gap`, found with the generation prompt after a question, at any position."""
        before = self.messages[:number]
        for asking in (before, [*before, {"role": "user", "content": "?"}]):
            try:
                plain, prompted = self._tail(asking), self._tail(asking, answer=True)
            except UserError:
                continue
            prompt = prompted[self.finder.common(plain, prompted) :].lstrip()
            token = self.finder.token_at(prompt, 0)
            anchor = prompt[:token] if token else prompt.partition("\n")[0].rstrip()
            place = gap.rfind(anchor)
            if not anchor or place < 0:
                continue
            end = place + self.finder.common(prompt, gap[place:])
            if not _begins_word(gap[end:]):
                return end
        return None

    def _end(self, number: int, region: Region) -> int:
        """Characters between the message's last text and the end of its turn."""
        gap = self.written.text[region.span.end : region.room.end]
        role = self.messages[number]["role"]
        follower = None if region.after is None else self.messages[region.after]["role"]

        def find() -> int:
            if follower is None:
                return self._ends(gap, self._followed(number))[0]
            alone = self._tail(self.messages[: number + 1])
            if not region.fields:
                alone = alone[region.span.start - region.room.start :]
            end = self._ends(alone, gap)[1]
            if region.after is not None and end > self.finder.common(alone, gap):
                end = min(end, len(gap) - self._opening(region.after, gap))
            self.finder.learn_end((role, follower), gap, end)
            return end

        known = None if follower is None else self.finder.end_known((role, follower), gap)
        return known if known is not None else self.finder.split(("end", role, follower, gap), find)

    def _opening(self, follower: int, gap: str) -> int:
        """Number of characters of `gap` that start the next message: the same as start another message of its role."""
        role = self.messages[follower]["role"]
        others = [number for number in self.written.regions if self.messages[number]["role"] == role]
        other = next((number for number in sorted(others) if number != follower), None)
        if other is None:
            return 0
        region = self.written.regions[other]
        opening = self.written.text[region.room.start : region.span.start]
        return _common_prefix(gap[::-1], opening[::-1])

    def _ends(self, alone: str, followed: str) -> tuple[int, int]:
        """The end of a turn in the text after its message: at the end of a conversation, and before other messages."""
        common = self.finder.common(alone, followed)
        same = self.finder.last_token(alone[:common])
        if same is not None:
            return same, same
        if not followed:
            last = self.finder.last_token(alone)
            return (len(alone) if last is None else last), 0
        ends = self.finder.token_at(alone, common), self.finder.token_at(followed, common)
        if ends[0] is None:  # only text ends a turn
            return common, common
        return ends[0], common if ends[1] is None else ends[1]

    def _followed(self, number: int) -> str:
        """The text after the last message if a user message follows."""
        more = [*self.messages, {"role": "user", "content": "?"}]
        try:
            written = self.marker.read(self.write(self.marker.mark(more), False))
        except UserError:
            return ""
        region = written.regions.get(number)
        return "" if region is None or region.after is None else written.text[region.span.end : region.room.end]

    def _tail(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """The text after the last message of a conversation."""
        written = self.marker.read(self.write(self.marker.mark(messages), answer))
        return written.text[max((span.end for span, _ in written.places), default=0) :]


def _common_prefix(one: str, other: str) -> int:
    """Length of the common prefix of both texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _begins_word(text: str) -> bool:
    return text[:1].isalnum()


def _meet(one: Span, other: Span) -> bool:
    return one.start < other.end and one.end > other.start


def _check_written(messages: Sequence[Message], written: Written, wanted: Collection[int]) -> None:
    """Raise UserError if a message's words are missing; an answer that is not wanted may be missing."""
    marked = any(messages[text.message]["role"] != "assistant" for _, text in written.places)
    for number, message in enumerate(messages):
        region, role = written.regions.get(number), message["role"]
        fields = region.fields if region else frozenset[str]()
        if message.get("tool_calls") and "tool_calls" not in fields:
            raise UserError(f"omits the tool calls of message {number + 1}")
        if "content" in fields or not (message["content"] or "").strip():
            continue
        if role == "assistant" and number in wanted:
            raise UserError(REWRITTEN)
        if role != "assistant" and (marked or message["content"].strip() not in written.text):
            raise UserError(f"omits a message of role {role!r}")


def _check_nothing_left_out(messages: Sequence[Message], text: str) -> None:
    for message in messages:
        if message["role"] != "assistant" and (message["content"] or "").strip() not in text:
            raise UserError(f"omits a message of role {message['role']!r}")
