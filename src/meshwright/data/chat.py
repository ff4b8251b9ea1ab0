"""The one place that writes conversations down as a chat template says, and knows which characters the assistant wrote.

Templates are Jinja, rendered as transformers does: in a sandbox, with the tokenizer's special tokens as variables.
They get no dates (`strftime_now`), so that the same conversation gives the same tokens on every day.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.problems import did_you_mean

TEMPLATES = Path(__file__).with_name("templates")
"""Folder of the named templates."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what `{% generation %}` marks, while it is rendered: code points that no text has."""
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
"""The named templates."""
NO_TEMPLATE = (
    "data.chat.template: the tokenizer has no chat template of its own; choose one of "
    f"{', '.join(NAMES)}, or give a Jinja file"
)
"""What is wrong where a conversation has no template."""
_ANGLED = re.compile(r"<\|\w+\|>")

Message = Mapping[str, Any]
"""`role`, `content` and whatever else a template knows."""


class Span(NamedTuple):
    """Characters `start` to `end - 1` of a text."""

    start: int
    end: int


class ChatTemplate:
    """A chat template with the special tokens of a tokenizer."""

    def __init__(self, source: str, tokenizer: TextTokenizer, *, name: str):
        """`name` is what messages call it. Raises ValueError where it is no Jinja."""
        self.source, self.name = source, name
        self._specials = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._token_id = tokenizer.token_id
        self._variables = tokenizer.named_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat template {name}: {error}") from error

    def render(self, messages: Sequence[Message], *, tools: Any = None, answer: bool = False) -> str:
        """The conversation as text; `answer` puts behind it what makes the assistant speak next.

        Raises ValueError where the template refuses the conversation.
        """
        return self._render(messages, tools, answer).replace(BEGIN, "").replace(END, "")

    def turns(
        self, messages: Sequence[Message], *, tools: Any = None, given: int = 0, last: bool = False
    ) -> tuple[str, list[Span]]:
        """(the conversation as text, what of it each assistant message after the first `given` messages wrote).

        What the assistant writes begins behind what the template puts there to make it speak and ends with the token
        that ends its turn. Where the template marks it (`{% generation %}`) that is taken; else it is found by writing
        down only the messages before a turn, and those up to it. `last`: the last of these turns only.

        Raises ValueError where the template refuses the conversation, leaves a message out, or writes a turn otherwise
        once others follow it.
        """
        marked = self._render(messages, tools, False)
        text = marked.replace(BEGIN, "").replace(END, "")
        for message in messages:
            content = message.get("content")
            if message["role"] != "assistant" and isinstance(content, str) and content.strip() not in text:
                raise ValueError(f"the chat template {self.name} leaves out a message of role {message['role']!r}")
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if BEGIN in marked:
            spans = _marked(marked)
            if len(spans) != len(places):
                raise ValueError(
                    f"the chat template {self.name} marks {len(spans)} parts as generated, but the assistant has "
                    f"{len(places)} turns"
                )
            chosen = [span for place, span in zip(places, spans, strict=True) if place >= given]
            return text, chosen[-1:] if last else chosen
        wanted = [place for place in places if place >= given]
        return text, [self._turn(messages, tools, text, place) for place in (wanted[-1:] if last else wanted)]

    def ends_of_turn(self) -> list[int]:
        """Ids of the special tokens that end what the assistant writes; nothing where the template has none.

        Raises ValueError where the template refuses a conversation of one question.
        """
        content = "x"
        text, (span,) = self.turns([{"role": "user", "content": "?"}, {"role": "assistant", "content": content}])
        behind = text[text.index(content, span.start) + len(content) : span.end].strip()
        found = (self._token_id(token) for token in self._specials if behind.startswith(token))
        return [number for number in found if number is not None][:1]

    def may_end_turns(self) -> bool:
        """Whether a token ends what the assistant writes, as far as a template that refuses a lone question tells."""
        try:
            return bool(self.ends_of_turn())
        except ValueError:
            return True

    def _turn(self, messages: Sequence[Message], tools: Any, text: str, place: int) -> Span:
        before = self.render(messages[:place], tools=tools, answer=True)
        after = self.render(messages[: place + 1], tools=tools) if place + 1 < len(messages) else text
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template {self.name} writes the assistant's turn otherwise once others follow, so that what "
                "it wrote cannot be told; set data.chat.train_on=last, or mark it in the template by {% generation %}"
            )
        return Span(len(before), self._end_of_turn(after, len(before)))

    def _end_of_turn(self, text: str, start: int) -> int:
        """Without the white space that a template puts behind the token that ends a turn."""
        kept = text.rstrip()
        return max(start, len(kept)) if any(kept.endswith(token) for token in self._specials) else len(text)

    def _render(self, messages: Sequence[Message], tools: Any, answer: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=answer, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template {self.name} refuses this conversation: {error}") from error


def find_template(named: str, tokenizer: TextTokenizer, base_dir: Path) -> ChatTemplate:
    """The template that `data.chat.template` names: `auto`, a name, or a file relative to `base_dir`.

    Raises ValueError where there is none, or the tokenizer lacks its tokens.
    """
    if named == "auto":
        if tokenizer.chat_template is None:
            raise ValueError(NO_TEMPLATE)
        return ChatTemplate(tokenizer.chat_template, tokenizer, name="of the tokenizer")
    path = base_dir / named
    if named in NAMES:
        path = TEMPLATES / f"{named}.jinja"
    elif not path.is_file():
        raise ValueError(
            f"data.chat.template={named}: neither a file nor one of {', '.join(NAMES)}" + did_you_mean(named, NAMES)
        )
    source = path.read_text()
    lacking = [token for token in dict.fromkeys(_ANGLED.findall(source)) if tokenizer.token_id(token) is None]
    if lacking:
        raise ValueError(
            f"data.chat.template={named} needs the token {lacking[0]}, which the tokenizer has not; `plain` needs none"
        )
    return ChatTemplate(source, tokenizer, name=named)


def ask(
    tokenizer: TextTokenizer, prompts: Sequence[str], system: str | None = None
) -> tuple[list[list[int]], set[int]]:
    """(token ids of a conversation with each prompt, up to where the assistant speaks; tokens that end what it says).

    Raises ValueError where the tokenizer has no chat template.
    """
    template = find_template("auto", tokenizer, Path())
    before = [{"role": "system", "content": system}] if system else []
    texts = [template.render([*before, {"role": "user", "content": prompt}], answer=True) for prompt in prompts]
    return [ids for ids, _ in tokenizer.encode_marked(texts)], {tokenizer.eos_id, *template.ends_of_turn()}


class _Generation(Extension):
    """`{% generation %}`: what the assistant wrote stands between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads the class's set)

    def parse(self, parser: Parser) -> nodes.Node:
        """Make a call of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _marked(text: str) -> list[Span]:
    """The marked parts, by their places in the text without marks."""
    spans, place, start = [], 0, 0
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            start = place
        elif part == END:
            spans.append(Span(start, place))
        else:
            place += len(part)
    return spans


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers': not escaped for HTML, as Jinja's own is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> Literal[""]:
    raise TemplateError(message)
