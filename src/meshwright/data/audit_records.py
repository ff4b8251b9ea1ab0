"""The audit of conversations: trained tokens, decoded, must be the assistant's text, turn by turn. It does not use the
encoder, and of the template only the end of its generation prompt.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.data.chat import ChatTemplate
from meshwright.data.prepare import TokenStream
from meshwright.data.readers import read_documents
from meshwright.data.token_file import TokenFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import ChatSpec, DataSpec
from meshwright.spec.errors import UserError

_EMPTY_THOUGHT = re.compile(r"^<think>\s*</think>\s*")
"""The text that templates of reasoning models insert before an answer without a thought."""


def trained_text_problems(stream: TokenStream, tokenizer: TextTokenizer, data: DataSpec) -> Iterator[str]:
    """Faults in the trained tokens of a stream of records; dropped records may be missing."""
    wanted: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    richer: list[tuple[str, ...]] = []
    given: dict[bytes, list[bytes]] = {}
    unwanted = set[str]()
    for side in _records(stream):
        messages = _trained_messages(side, data.chat)
        left_out = (message for message in side.get("messages", []) if message.get("weight") == 0)
        unwanted |= {word for message in left_out for word in _words(message) if word}
        if "input_ids" in side:
            ids, trained = _keys(np.array(side["input_ids"]), np.array(side["labels"]) >= 0, data)
            given.setdefault(ids, []).append(trained)
        elif any(message.keys() & {"tool_calls", "reasoning_content"} for message in messages):
            richer.append(tuple(word for message in messages for word in _words(message)))
        else:
            answers = _answers(side, messages)
            wanted.setdefault(_stripped(answers), []).append(answers)
    before = (" ",) if _prompt_ends_in_space(tokenizer, data.chat) else (" ", "\n")
    for file in _sides(stream):
        assert file.trained is not None
        for number in range(file.num_documents):
            if given:
                span = slice(file.start(number), file.start(number + 1))
                ids, trained = _keys(np.asarray(file.tokens[span]), np.asarray(file.trained[span]), data)
                if trained in given.get(ids, ()):
                    given[ids].remove(trained)
                    continue
                if ids in given:
                    yield f"document {number} trains on other tokens than the record's labels"
                    continue
            if data.chat.train_on == "all":
                if any(not _holds_one(run, unwanted) for run in _runs(file, number, tokenizer, trained=False)):
                    yield f"document {number} has tokens without loss, though data.chat.train_on=all"
                continue
            texts, cut = _runs(file, number, tokenizer), data.chat.overlong == "truncate"
            if any(_in_order(" ".join(texts), words) for words in richer):
                continue
            left = wanted.get(_stripped(texts))
            if not (left and _margins_fit(texts, left.pop(), before)) and not (
                cut and _is_beginning(_stripped(texts), wanted)
            ):
                shown = " ... ".join(texts)[:80]
                yield f"document {number} trains on {shown!r}, which is not an assistant's text in the records"


def _records(stream: TokenStream) -> Iterator[dict[str, Any]]:
    """The records of a stream; of a preference, both sides."""
    for document in read_documents(stream.files):
        record = json.loads(document.text)
        yield from (record["chosen"], record["rejected"]) if "chosen" in record else (record,)


def _keys(ids: np.ndarray, trained: np.ndarray, data: DataSpec) -> tuple[bytes, bytes]:
    """(tokens, trained ones) of a document that is given in tokens."""
    most = data.sequence_length + 1 if data.chat.overlong == "truncate" else len(ids)
    return ids[:most].astype(np.int64).tobytes(), trained[:most].astype(bool).tobytes()


def _holds_one(text: str, contents: Collection[str]) -> bool:
    """Whether one of the contents is in the text."""
    return any(content in text for content in contents)


def _sides(stream: TokenStream) -> list[TokenFile]:
    return [stream.train, *([stream.held_out] if stream.held_out else [])]


def _trained_messages(record: dict[str, Any], chat: ChatSpec) -> list[dict[str, Any]]:
    """The messages of a conversation that carry loss."""
    messages = record.get("messages", [])[record.get("given", 0) :]
    by_role = [message for message in messages if message["role"] in chat.roles_to_train]
    by_role = by_role[-1:] if chat.train_on == "last" else by_role
    return [
        message for message in messages if message.get("weight", 1 if any(message is one for one in by_role) else 0)
    ]


def _answers(record: dict[str, Any], messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The assistant's texts, without tool calls."""
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


def _margins_fit(trained: Sequence[str], answers: Sequence[str], before: tuple[str, ...]) -> bool:
    """Whether the whitespace around the trained text is the answer's own, none, or one of `before` in front."""
    return all(
        (run[1:] if run.startswith(before) else run) in (answer, answer.strip(), answer.removeprefix(" "))
        for run, answer in zip(trained, answers, strict=True)
    )


def _prompt_ends_in_space(tokenizer: TextTokenizer, chat: ChatSpec) -> bool:
    """Whether whitespace ends the generation prompt; else, as with GLM-4, the assistant itself writes a line break."""
    if tokenizer.chat_template is None:
        return True
    try:
        template = ChatTemplate(tokenizer.chat_template, tokenizer, name="of the run", chat=chat)
        return template.render([{"role": "user", "content": "?"}], answer=True)[-1:].isspace()
    except UserError:
        return True


def _runs(file: TokenFile, number: int, tokenizer: TextTokenizer, *, trained: bool = True) -> tuple[str, ...]:
    """The text of each run of trained tokens of a document, or of those that are not trained."""
    assert file.trained is not None
    span = slice(file.start(number), file.start(number + 1))
    tokens, chosen = np.asarray(file.tokens[span]), np.asarray(file.trained[span]).astype(bool) == trained
    borders = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    runs = (tokenizer.decode_text(tokens[start:end]) for start, end in list(pairwise(borders))[::2])
    return tuple(_EMPTY_THOUGHT.sub("", run) for run in runs)


def _is_beginning(trained: Sequence[str], wanted: Iterable[tuple[str, ...]]) -> bool:
    """Whether this is the start of a truncated record."""
    *whole, last = trained or ("",)
    return any(
        list(answers[: len(whole)]) == whole and len(answers) > len(whole) and answers[len(whole)].startswith(last[:-1])
        for answers in wanted
    )
