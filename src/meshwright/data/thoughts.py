"""Thoughts before answers: left out, or kept in every turn, even if a chat template drops earlier ones."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from meshwright.data.marks import Span
from meshwright.data.turns import Conversation, Message, Turn

Find = Callable[[Sequence[Message], Sequence[int]], Conversation]
"""Renders messages and finds the turns of the messages with the given numbers."""
FIELD = "reasoning_content"
_WRITTEN = re.compile(r"^\s*<(think|thinking)>.*?</\1>\s*", re.DOTALL)
"""A thought inside the answer's text."""


def without(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without thoughts."""
    kept = [{key: value for key, value in message.items() if key != FIELD} for message in messages]
    for message in kept:
        if message["role"] == "assistant":
            message["content"] = _WRITTEN.sub("", message["content"])
    return kept


def in_answers(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with each thought before its answer's text, for templates without a field for thoughts."""
    changed = []
    for message in messages:
        message = dict(message)
        if thought := message.pop(FIELD, None):
            message["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"
        changed.append(message)
    return changed


def kept(messages: Sequence[Message], wanted: Sequence[int], find: Find) -> Conversation:
    """The conversation with each assistant turn rendered as if it were the newest.

    A template omits the thoughts of turns before the last question. So the messages up to each question's answer are
    also rendered separately, and each turn is taken from that rendering, up to the token that ends it.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    whole = find(messages, sorted({*answers, *wanted}))
    questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
    first = questions[0] if questions else 0
    newest: dict[int, Conversation] = {}
    for start, stop in pairwise(questions):
        inside = [number for number in answers if start < number < stop]
        if any(_has_thought(messages[number]) for number in inside):
            shift = start - first
            alone = find([*messages[:first], *messages[start:stop]], [number - shift for number in inside])
            newest |= {number: alone._replace(turns={0: alone.turns[number - shift]}) for number in inside}
    return _joined(whole, newest, wanted)


def _has_thought(message: Message) -> bool:
    return bool(message.get(FIELD) or _WRITTEN.match(message["content"]))


def _joined(whole: Conversation, newest: dict[int, Conversation], wanted: Sequence[int]) -> Conversation:
    """The whole conversation with some turns replaced by their separate renderings."""
    text, place = "", 0
    turns: dict[int, Turn] = {}
    texts: list[Span] = []

    def copy(source: Conversation, start: int, end: int) -> int:
        nonlocal text
        shift = len(text) - start
        texts.extend(Span(a + shift, b + shift) for a, b in source.texts if start <= a and b <= end)
        text += source.text[start:end]
        return shift

    for number, turn in sorted(whole.turns.items(), key=lambda item: item[1].parts[0].start):
        copy(whole, place, turn.parts[0].start)
        replacement = newest.get(number)
        source, own = (whole, turn) if replacement is None else (replacement, replacement.turns[0])
        shift = copy(source, own.parts[0].start, own.end)
        parts = [Span(start + shift, end + shift) for start, end in own.parts]
        ending = turn.parts[-1].end - turn.end
        copy(whole, turn.end, turn.parts[-1].end)
        turns[number] = Turn((*parts[:-1], Span(parts[-1].start, own.end + shift + ending)), own.end + shift)
        place = turn.parts[-1].end
    copy(whole, place, len(whole.text))
    return Conversation(text, {number: turns[number] for number in wanted}, texts)
