"""Prompts of a served model: texts to continue, and conversations rendered by its chat template."""

import threading
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from meshwright.data.chat import ChatTemplate, find_template
from meshwright.data.tokenizer import TextTokenizer
from meshwright.data.tools import calls_of, tools_of
from meshwright.serve.token_ids import end_ids
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError


class PromptEncoder:
    """Encodes prompts. Thread-safe; one per tokenizer, which cannot encode in two threads at once."""

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

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def shown(self, ends: frozenset[int]) -> list[str]:
        """Tokens in readable form."""
        return [self._tokenizer.decode([end]) for end in sorted(ends)]

    def text(self, text: str) -> list[int]:
        """Token ids of a text to be continued; an empty text starts a document."""
        with self._lock:
            return self._tokenizer.encode_prompt(text) or [self._tokenizer.eos_id]

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of the conversation and the generation prompt. Special tokens in messages are encoded as text.

        Raises `UserError` if there is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise UserError("the model's tokenizer has no chat template")
        tools = tools_of(tools, "tools") if tools else None
        messages = [_with_calls(message) for message in messages]
        with self._lock:
            text = self._template.render(messages, tools=tools, answer=True)
            if not any(map(self._tokenizer.special_pattern.search, _texts(messages))):
                return self._tokenizer.encode_marked([text])[0][0]
            told = self._template.turns(messages, [], tools=tools)
            if not text.startswith(told.text):
                raise UserError(
                    "a message contains the text of a special token, which this chat template cannot escape"
                )
            return self._tokenizer.encode_conversation(text, told.texts)[0]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": calls_of(calls, "tool_calls")} if calls else dict(message)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [value for message in messages for value in message.values() if isinstance(value, str)]
