"""Prompts of a served model: texts to continue, and conversations rendered by its chat template."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.chat import ChatTemplate, find_template
from meshwright.data.fewest_tokens import FewestTokens
from meshwright.data.tokenizer import TextTokenizer
from meshwright.data.tools import calls_of, tools_of
from meshwright.serve.token_ids import end_ids
from meshwright.serve.tool_calls import CallForm, call_form
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError


class PromptTooLongError(UserError):
    """A prompt has more tokens than the model supports."""


class EncodingStoppedError(Exception):
    """The encoding of a prompt was ended: its client has left, or its time is over."""


class EncodingLimits:
    """The limits of one request's prompts. They are checked after each piece of a text."""

    def __init__(self, most: int | None = None, seconds: float = float("inf")) -> None:
        """`most`: tokens of prompt and answer; None: any number."""
        self._most, self._end, self._stopped = most, time.monotonic() + seconds, False

    def stop(self) -> None:
        """The prompts are no longer wanted."""
        self._stopped = True

    def check(self, tokens: int) -> None:
        """Raise `PromptTooLongError` if a prompt of at least this many tokens is too long, `EncodingStoppedError` if it
        is no longer wanted."""
        if self._stopped or time.monotonic() > self._end:
            raise EncodingStoppedError
        if self._most is not None and tokens >= self._most:
            raise PromptTooLongError(
                f"the prompt has at least {tokens} tokens, but the model supports {self._most}; shorten it"
            )


class PromptEncoder:
    """Encodes prompts. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._template: ChatTemplate | None = None
        self.text_ends = frozenset(end_ids(tokenizer))
        """Tokens that end a text."""
        self.answer_ends = self.text_ends
        """Tokens that end the assistant's turn."""
        if tokenizer.chat_template is not None:
            today = ChatSpec(date=date.today().isoformat())
            self._template = find_template("auto", tokenizer, Path(), today)
            self.answer_ends = self.text_ends.union(self._template.ends_of_turn())

    @cached_property
    def calls(self) -> CallForm | None:
        """The form of calls in the model's answers; None if it is not known."""
        template = self._template
        if template is None:
            return None
        with self._lock:
            return call_form(lambda calls: template.answer({"role": "assistant", "content": "", "tool_calls": calls}))

    def decode_calls(self, ids: Sequence[int]) -> str:
        """The text of an answer that may have calls: with the special tokens that belong to them."""
        return self._tokenizer.decode([number for number in ids if number not in self._silent])

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def shown(self, ends: frozenset[int]) -> list[str]:
        """Tokens in readable form."""
        return [self._tokenizer.decode([end]) for end in sorted(ends)]

    def text(self, text: str, limits: EncodingLimits | None = None) -> list[int]:
        """Token ids of a text to be continued; an empty text starts a document. Raises like `EncodingLimits.check`."""
        limits = limits or EncodingLimits()
        limits.check(self._fewest.of(text))
        return self._tokenizer.encode_prompt(text, limits.check) or [self._tokenizer.eos_id]

    def tokens(self, text: str, limits: EncodingLimits, *, around: bool) -> list[int]:
        """Token ids of a text; `around`: with the tokens that the tokenizer puts around one."""
        encode = self._tokenizer.encode_prompt if around else self._tokenizer.encode_long
        return encode(text, limits.check)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        limits: EncodingLimits | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        answer: bool = True,
    ) -> list[int]:
        """Token ids of the conversation and, unless `answer` is false, the generation prompt. Special tokens in
        messages are encoded as text. `arguments`: the template's, such as `enable_thinking`.

        Raises `UserError` if there is no template, it refuses the conversation or omits tools, or tools or arguments
        spell a special token; and like `EncodingLimits.check`.
        """
        if self._template is None:
            raise UserError("the model's tokenizer has no chat template")
        limits = limits or EncodingLimits()
        template = self._template.with_arguments(arguments) if arguments else self._template
        tools = tools_of(tools, "tools") if tools else None
        messages = [_with_calls(message) for message in messages]
        special = self._tokenizer.special_pattern
        for name, given in (("tools", tools), ("chat_template_kwargs", arguments)):
            if match := next(filter(None, map(special.search, _texts(given))), None):
                raise UserError(f"{name}: contains the text of the special token {match[0]}")
        with self._lock:
            if tools and not template.writes_tools():
                raise UserError("tools: the model's chat template omits them")
            text = template.render(messages, tools=tools, answer=answer)
            limits.check(self._fewest.of(text))
            spans: Sequence[tuple[int, int]] = ()
            if any(map(special.search, _texts(messages))):
                conversation = template.turns(messages, [], tools=tools)
                if not text.startswith(conversation.text):
                    raise UserError(
                        "a message contains the text of a special token, which this chat template cannot escape"
                    )
                spans = conversation.texts
        return self._tokenizer.encode_conversation(text, spans, limits.check)[0]

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Special tokens that belong to no call."""
        call_texts = self.calls.texts if self.calls else ""
        numbers = (
            self._tokenizer.token_id(token) for token in self._tokenizer.special_tokens if token not in call_texts
        )
        return frozenset(number for number in numbers if number is not None)

    @cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(json.loads(self._tokenizer.files["tokenizer.json"]))


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": calls_of(calls, "tool_calls")} if calls else dict(message)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of JSON, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
