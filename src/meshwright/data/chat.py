"""Chat templates: conversations rendered by Jinja, and the span of characters of each message."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.marks import RESERVED, THOUGHTS
from meshwright.data.sandbox import BEGIN, END, Sandbox
from meshwright.data.tokenizer import TextTokenizer, any_of
from meshwright.data.tools import ToolCallFormat, form_of, in_form
from meshwright.data.turns import Conversation, Message, TurnFinder
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError
from meshwright.spec.problems import did_you_mean

TEMPLATES = Path(__file__).with_name("templates")
"""Folder of the named templates."""
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
"""The named templates."""
NO_TEMPLATE = (
    f"data.chat.template: the tokenizer has no chat template; choose one of {', '.join(NAMES)}, or give a Jinja file"
)
"""The error for conversations without a template."""
Variables = Mapping[str, Any]
"""Variables of a template by name."""
NO_VARIABLES: Variables = {}
FINDERS = 64
"""Most sets of variables whose turns are remembered."""
_ANGLED = re.compile(r"<\|\w+\|>")
_MISTRAL = ("<s>", "[INST]", "[/INST]")
"""Tokens in which the template `mistral` was trained; a tokenizer without them can write it as text."""
_MISTRAL_TOOLS = ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
"""Tokens that the template `mistral` needs for tools."""


class ChatTemplate:
    """A chat template with the special tokens of a tokenizer."""

    def __init__(self, source: str, tokenizer: TextTokenizer, *, name: str, chat: ChatSpec | None = None):
        """`name` is its name in error messages; `chat` sets the template's date and arguments.

        Raises UserError if it is not valid Jinja.
        """
        chat = chat or ChatSpec()
        self.source, self.name = source, name
        self._token_id = tokenizer.token_id
        self._variables = {**tokenizer.named_tokens, **chat.template_arguments}
        self._special = (*tokenizer.special_tokens, tokenizer.decode([tokenizer.eos_id]))
        self._finders: dict[str, TurnFinder] = {}
        try:
            self._sandbox = Sandbox(source, today=date.fromisoformat(chat.date))
        except UserError as error:
            raise UserError(f"chat template {name}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        variables: Variables = NO_VARIABLES,
        answer: bool = False,
    ) -> str:
        """The conversation as text; `answer` appends the generation prompt.

        Raises UserError if the template refuses the conversation.
        """
        text = self._render(self.prepared(messages), {**variables, "tools": tools}, answer)
        return text.replace(BEGIN, "").replace(END, "")

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """The template with these arguments besides its own, such as `enable_thinking`.

        Raises UserError for a name of what every conversation gives it.
        """
        if reserved := {"messages", "tools", "add_generation_prompt"} & arguments.keys():
            raise UserError(f"a chat template's argument cannot be {min(reserved)}; it comes from the request")
        other = copy.copy(self)
        other._variables = {**self._variables, **arguments}
        return other

    def writes_tools(self) -> bool:
        """Whether it renders tools."""
        tools, question = [{"type": "function", "function": {"name": "probe_name"}}], {"role": "user", "content": "?"}
        try:
            return "probe_name" in self.render([question], tools=tools, answer=True)
        except UserError:  # it may demand a description, and so reads tools
            return True

    def answer(self, message: Message) -> str:
        """An assistant's turn as the model writes it, without what the template puts before words and after the turn.

        Raises UserError if the template refuses such a message.
        """
        question = {"role": "user", "content": "?"}
        texts = []
        for reply in ({"role": "assistant", "content": "probe_words"}, message):
            text, turns, _ = self.turns([question, reply], [1])
            texts.append(text[turns[1].parts[0].start : turns[1].end])
        before = texts[0].partition("probe_words")[0]
        return texts[1].removeprefix(before) if before else texts[1]

    def prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the template's form: tool calls in its format and, as in transformers, thoughts under every
        name."""
        return self._in_form(map(_with_thoughts, messages))

    def turns(
        self,
        messages: Sequence[Message],
        wanted: Sequence[int],
        *,
        tools: Any = None,
        variables: Variables = NO_VARIABLES,
    ) -> Conversation:
        """The conversation as text, and the spans of the messages with the numbers `wanted`. `variables` are further
        variables of the template, such as documents.

        Raises UserError if the template refuses the conversation, omits some of it, or renders a turn so that its span
        is ambiguous.
        """
        self._check(messages, tools, variables)
        if self.name == "mistral" and (tools or any(message.get("tool_calls") for message in messages)):
            lacking = [token for token in _MISTRAL_TOOLS if self._token_id(token) is None]
            if lacking:
                raise UserError(
                    f"the chat template mistral needs the token {lacking[0]} for tools, which the tokenizer lacks; "
                    "`plain` needs no token"
                )

        def write(shown: Sequence[Message], answer: bool) -> str:
            return self._render(self._in_form(shown), {**variables, "tools": tools}, answer)

        try:
            return self._finder(variables).find(list(map(_with_thoughts, messages)), write, wanted)
        except UserError as error:
            known = str(error).startswith("the chat template")
            raise UserError(str(error) if known else f"the chat template {self.name} {error}") from error

    def ends_of_turn(self) -> list[int]:
        """Ids of the special tokens that end an assistant's turn, last or not; empty if the template has none.

        Raises UserError if the template refuses a conversation of one question.
        """
        question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}
        ends = list[str]()
        for messages in ([question, reply], [question, reply, question, reply]):
            try:
                text, turns, _ = self.turns(messages, [1])
            except UserError:
                if not ends and len(messages) == 2:
                    raise
                continue
            ends.append(text[turns[1].end : turns[1].parts[-1].end].strip())
        numbers = (self._token_id(end) for end in dict.fromkeys(ends))
        return [number for number in numbers if number is not None]

    def without_end(self) -> str:
        """The remark that no token ends the assistant's turn, so its end is not trained; empty if one does, or may do:
        some templates refuse the probe of a single question."""
        question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}
        try:
            if self.ends_of_turn():
                return ""
            text, turns, _ = self.turns([question, reply, question], [1])
        except UserError:
            return ""
        next_token = any_of(self._special).match(text[turns[1].end :].lstrip())
        instead = f" but the next message's {next_token[0]}, which carries no loss" if next_token else ""
        return (
            f"chat template {self.name} has no special token after the assistant's turn{instead}, so the model will "
            "not learn to stop; add {{ eos_token }} there"
        )

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether it renders thoughts from a separate field, at least in the last turn."""
        reply = {"role": "assistant", "content": "x", THOUGHTS[0]: "probe_thought"}
        return "probe_thought" in self.render([{"role": "user", "content": "?"}, reply])

    @cached_property
    def _form(self) -> ToolCallFormat:
        return form_of(lambda messages: self._render(list(messages), NO_VARIABLES, False))

    def _finder(self, variables: Variables) -> TurnFinder:
        """What is known about the template's turns with these variables, which may change its prompts."""
        key = json.dumps(variables, sort_keys=True)
        if key not in self._finders:
            if len(self._finders) >= FINDERS:
                self._finders.clear()
            self._finders[key] = TurnFinder(self._special)
        return self._finders[key]

    def _in_form(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        messages = list(messages)
        calls = any(message.get("tool_calls") for message in messages)
        return in_form(messages, self._form if calls else ToolCallFormat())

    def _check(self, messages: Sequence[Message], tools: Any, variables: Variables) -> None:
        """Raise UserError for content that the template would omit, or that would collide with the markers."""
        if any(RESERVED.search(message.get(name) or "") for message in messages for name in ("content", THOUGHTS[0])):
            raise UserError(
                "a message contains a code point from U+FDD0 to U+FDEF, which Unicode reserves for internal use"
            )
        shown = {**variables, "tools": tools}
        for name in ("tools", "documents"):
            without = {key: value for key, value in shown.items() if key != name}
            if shown.get(name) and self._plain(messages, without) == self._plain(messages, shown):
                raise UserError(f"the chat template {self.name} omits the record's {name}")
        unused = next((name for name in variables if not re.search(rf"\b{re.escape(name)}\b", self.source)), None)
        if unused:
            raise UserError(f"the chat template {self.name} does not use the record's {unused!r}")
        if any(message.get(THOUGHTS[0]) for message in messages) and not self.writes_thoughts:
            raise UserError(
                f"the chat template {self.name} omits thoughts ({THOUGHTS[0]}); set data.chat.thinking=drop or keep"
            )

    def _plain(self, messages: Sequence[Message], variables: Variables) -> str:
        return self._render(self.prepared(messages), variables, False)

    def _render(self, messages: Sequence[Message], variables: Variables, answer: bool) -> str:
        """The conversation as text with marks of generation; `variables` take precedence over the recipe's."""
        given = {"tools": None, **self._variables, **variables}
        try:
            return self._sandbox.render({**given, "messages": messages, "add_generation_prompt": answer})
        except UserError as error:
            raise UserError(f"the chat template {self.name} rejects this conversation: {error}") from error


def _with_thoughts(message: Message) -> Message:
    thought = message.get(THOUGHTS[0])
    return {**dict.fromkeys(THOUGHTS, thought), **message} if thought else message


def find_template(named: str, tokenizer: TextTokenizer, base_dir: Path, chat: ChatSpec | None = None) -> ChatTemplate:
    """The template that `data.chat.template` names: `auto`, a name, or a file relative to `base_dir`; `chat` as in
    `ChatTemplate`.

    Raises UserError if there is none, or if the tokenizer lacks its tokens.
    """
    if named == "auto":
        if tokenizer.chat_template is None:
            raise UserError(NO_TEMPLATE)
        return ChatTemplate(tokenizer.chat_template, tokenizer, name="of the tokenizer", chat=chat)
    path = base_dir / named
    if named in NAMES:
        path = TEMPLATES / f"{named}.jinja"
    elif not path.is_file():
        raise UserError(
            f"data.chat.template={named}: is neither a file nor one of {', '.join(NAMES)}" + did_you_mean(named, NAMES)
        )
    source = path.read_text()
    if lacking := _lacking(source, tokenizer):
        usable = [name for name in NAMES if not tokens_lacking(name, tokenizer)]
        raise UserError(
            f"data.chat.template={named} needs the token {lacking[0]}, which the tokenizer lacks; it has the tokens of "
            f"{' and '.join(usable)}"
        )
    return ChatTemplate(source, tokenizer, name=named, chat=chat)


def tokens_lacking(name: str, tokenizer: TextTokenizer) -> list[str]:
    """The special tokens of a named template that a tokenizer lacks; `plain` has none."""
    lacking = _lacking((TEMPLATES / f"{name}.jinja").read_text(), tokenizer)
    needs = _MISTRAL if name == "mistral" else ()
    return lacking + [token for token in needs if tokenizer.token_id(token) is None]


def _lacking(source: str, tokenizer: TextTokenizer) -> list[str]:
    return [token for token in dict.fromkeys(_ANGLED.findall(source)) if tokenizer.token_id(token) is None]


def ask(
    tokenizer: TextTokenizer, prompts: Sequence[str], system: str | None = None
) -> tuple[list[list[int]], set[int]]:
    """(token ids of a conversation with each prompt and the generation prompt; tokens that end the answer).

    Raises UserError if the tokenizer has no chat template.
    """
    template = find_template("auto", tokenizer, Path())
    before = [{"role": "system", "content": system}] if system else []
    texts = [template.render([*before, {"role": "user", "content": prompt}], answer=True) for prompt in prompts]
    return [ids for ids, _ in tokenizer.encode_marked(texts)], {tokenizer.eos_id, *template.ends_of_turn()}
