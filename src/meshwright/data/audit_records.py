"""The audit of conversations: trained tokens, decoded, must be the assistant's text, turn by turn. It uses neither
template nor encoder.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.data.prepare import TokenStream
from meshwright.data.readers import read_documents
from meshwright.data.token_file import TokenFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import ChatSpec, DataSpec

_EMPTY_THOUGHT = re.compile(r"^<think>\s*</think>\s*")
"""The text that templates of reasoning models insert before an answer without a thought."""


def trained_text_problems(stream: TokenStream, tokenizer: TextTokenizer, data: DataSpec) -> Iterator[str]:
    """Faults in the trained tokens of a stream of records; dropped records may be missing."""
    if data.chat.train_on == "all":
        for file in _sides(stream):
            if file.trained is not None and not file.trained.all():
                yield "some tokens carry no loss, though data.chat.train_on=all"
        return
    wanted: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    richer: list[tuple[str, ...]] = []
    for document in read_documents(stream.files):
        record = json.loads(document.text)
        for side in (record["chosen"], record["rejected"]) if "chosen" in record else (record,):
            messages = _trained_messages(side, data.chat)
            if any(message.keys() & {"tool_calls", "reasoning_content"} for message in messages):
                richer.append(tuple(word for message in messages for word in _words(message)))
                continue
            answers = _answers(side, messages)
            wanted.setdefault(_stripped(answers), []).append(answers)
    for file in _sides(stream):
        for number in range(file.num_documents):
            found, cut = _trained_runs(file, number, tokenizer), data.chat.overlong == "truncate"
            if any(_in_order(" ".join(found), words) for words in richer):
                continue
            left = wanted.get(_stripped(found))
            if not (left and _margins_fit(found, left.pop())) and not (cut and _is_beginning(_stripped(found), wanted)):
                shown = " ... ".join(found)[:80]
                yield f"document {number} trains on {shown!r}, which is not an assistant's text in the records"


def _sides(stream: TokenStream) -> list[TokenFile]:
    return [stream.train, *([stream.held_out] if stream.held_out else [])]


def _trained_messages(record: dict[str, Any], chat: ChatSpec) -> list[dict[str, Any]]:
    """The messages of a conversation that carry loss."""
    messages = [
        message
        for message in record.get("messages", [])[record.get("given", 0) :]
        if message["role"] in chat.roles_to_train
    ]
    messages = messages[-1:] if chat.train_on == "last" else messages
    return [message for message in messages if message.get("weight", 1)]


def _answers(record: dict[str, Any], messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The assistant's texts, without tool calls."""
    if "input_ids" in record:
        return ()
    if "prompt" in record:
        return (record["completion"],)
    return tuple(message["content"] for message in messages)


def _words(message: dict[str, Any]) -> list[str]:
    """The texts and names in a message with tool calls, in the order in which templates render them. Templates differ
    in the format of arguments and in the thoughts that they omit."""
    return [message["content"].strip(), *(call["function"]["name"] for call in message.get("tool_calls", []))]


def _in_order(text: str, words: Sequence[str]) -> bool:
    place = 0
    for word in words:
        place = text.find(word, place)
        if place < 0:
            return False
        place += len(word)
    return any(words)


def _stripped(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts)


def _margins_fit(found: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether the whitespace around the trained text is the answer's own, none, or one leading space."""
    return all(
        run.removeprefix(" ") in (answer, answer.strip(), answer.removeprefix(" "))
        for run, answer in zip(found, answers, strict=True)
    )


def _trained_runs(file: TokenFile, number: int, tokenizer: TextTokenizer) -> tuple[str, ...]:
    """The text of each run of trained tokens of a document."""
    assert file.trained is not None
    span = slice(file.start(number), file.start(number + 1))
    tokens, trained = np.asarray(file.tokens[span]), np.asarray(file.trained[span])
    borders = np.flatnonzero(np.diff(trained, prepend=0, append=0).astype(bool))
    runs = (tokenizer.decode_text(tokens[start:end]) for start, end in list(pairwise(borders))[::2])
    return tuple(_EMPTY_THOUGHT.sub("", run) for run in runs)


def _is_beginning(found: Sequence[str], wanted: Iterable[tuple[str, ...]]) -> bool:
    """Whether this is the start of a truncated record."""
    *whole, last = found or ("",)
    return any(
        list(answers[: len(whole)]) == whole and len(answers) > len(whole) and answers[len(whole)].startswith(last[:-1])
        for answers in wanted
    )
