"""The Modelfile for Ollama, with the chat template in Ollama's language, which is Go's `text/template`.

Go's templates cannot run Jinja. Most chat templates only put texts around messages, which depend on the roles of a
message and of the one before it. These texts are found by rendering a few conversations. The result is used only if it
renders other conversations as the model's own template does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from meshwright.data.chat import ChatTemplate, find_template
from meshwright.data.tokenizer import TextTokenizer
from meshwright.handover.receipt import CONVERSATIONS
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError

ROLES = ("system", "user", "assistant")
START, END = "start", "end"
"""In the place of a role: before the first message, and after the last one, where the answer begins."""
LEARNT = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "system", "user"),
)
"""Conversations from which the texts are learnt."""
PROVED = (("user",), ("system", "user"), ("user", "assistant", "user"), (*LEARNT[1], "assistant", "user"))
"""Conversations on which they are proved, besides the receipt's."""

Messages = Sequence[Mapping[str, str]]
Write = Callable[[Messages], str]


@dataclass(frozen=True)
class ChatTexts:
    """The texts between the messages of a conversation."""

    between: Mapping[tuple[str, str], str]
    """(role before, role after) -> text."""

    def render(self, messages: Messages) -> str:
        """The conversation, up to the answer. Raises `KeyError` for roles that did not follow each other."""
        text, last = "", START
        for message in messages:
            text += self.between[last, message["role"]] + message["content"]
            last = message["role"]
        return text + self.between[last, END]

    def go(self) -> str:
        """As a template of Ollama's."""
        lines = [f'{{{{- $last := "{START}" -}}}}', "{{- range .Messages -}}"]
        for role in ROLES:
            texts = {before: text for (before, after), text in self.between.items() if after == role}
            if texts:
                word = "if" if lines[-1].startswith("{{- range") else "else if"
                lines += [f'{{{{- {word} eq .Role "{role}" -}}}}', *_cases(texts), "{{- .Content -}}"]
        lines += ["{{- end -}}", "{{- $last = .Role -}}", "{{- end -}}"]
        ends = {before: text for (before, after), text in self.between.items() if after == END}
        return "\n".join([*lines, *_cases(ends)])


def modelfile(tokenizer: TextTokenizer, weights: str, context: int, ends: Sequence[str]) -> tuple[str, list[str]]:
    """The Modelfile of a file of weights, and remarks on what it lacks. `ends`: texts that end answers."""
    lines = [f"FROM ./{weights}", f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends]
    notes: list[str] = []
    if tokenizer.chat_template is not None:
        try:
            texts, notes = chat_texts(tokenizer)
            lines.append(f'TEMPLATE """{texts.go()}"""')
        except UserError as error:
            notes = [
                f"warning: the Modelfile has no TEMPLATE, because {error}; Ollama sends the model bare prompts unless "
                "you write one; llama-server --jinja renders the model's own"
            ]
    return "\n".join([*(f"# {note}" for note in notes), *lines]) + "\n", notes


def chat_texts(tokenizer: TextTokenizer) -> tuple[ChatTexts, list[str]]:
    """The texts of the tokenizer's chat template, and remarks. Raises `UserError` if Ollama cannot render it."""
    template, later = (_template(tokenizer, year) for year in (2026, 2031))
    written, first = _writer(template), _messages(LEARNT[0])
    if written(first) != _writer(later)(first):
        raise UserError("the chat template writes the date")
    between: dict[tuple[str, str], str] = {}
    for roles in LEARNT:
        try:
            text = written(_messages(roles))
        except UserError:
            if roles == LEARNT[0]:
                raise
            continue
        between |= _learnt(roles, text, between)
    texts, notes = ChatTexts(between), []
    _prove(texts, written)
    if (START, "system") not in between:
        notes.append("the chat template refuses system messages; Ollama leaves them out")
    if written(_messages(("user",), " {} \n")) != texts.render(_messages(("user",), " {} \n")):
        notes.append("the chat template trims messages; Ollama does not")
    if template.writes_tools():
        notes.append("the Modelfile's TEMPLATE has no tools: Ollama writes JSON otherwise than the model has learnt it")
    return _without_begin(texts, tokenizer, notes), notes


def _learnt(roles: Sequence[str], text: str, known: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """The texts between the messages of one conversation."""
    between, place, last = dict(known), 0, START
    for number, role in enumerate((*roles, END)):
        start = text.find(_text(number), place) if role != END else len(text)
        if start < 0:
            raise UserError("the chat template leaves out or changes messages")
        if between.setdefault((last, role), text[place:start]) != text[place:start]:
            raise UserError("the chat template's texts depend on more than the roles of two messages")
        place, last = start + len(_text(number)), role
    return between


def _prove(texts: ChatTexts, written: Write) -> None:
    """Raise `UserError` if a conversation is rendered otherwise than by the model's template."""
    for messages in (*map(_messages, PROVED), *CONVERSATIONS):
        try:
            wanted = written(messages)
        except UserError:
            continue
        try:
            equal = texts.render(messages) == wanted
        except KeyError:
            equal = False
        if not equal:
            raise UserError("the chat template's texts depend on more than the roles of two messages")


def _without_begin(texts: ChatTexts, tokenizer: TextTokenizer, notes: list[str]) -> ChatTexts:
    """Without the tokens that llama.cpp itself puts before every prompt."""
    begin = tokenizer.decode(tokenizer.encode_prompt(""))
    starts = {pair: text for pair, text in texts.between.items() if pair[0] == START}
    if begin and not all(text.startswith(begin) for text in starts.values()):
        notes.append(f"Ollama puts {begin} before the prompt, which the chat template does not")
        return texts
    return replace(texts, between={**texts.between, **{pair: text[len(begin) :] for pair, text in starts.items()}})


def _cases(texts: Mapping[str, str]) -> list[str]:
    """Actions that write the text which belongs to the role before."""
    if len(set(texts.values())) == 1 and len(texts) > 1:
        return [_literal(next(iter(texts.values())))]
    lines = []
    for number, (before, text) in enumerate(texts.items()):
        lines += [f'{{{{- {"else " if number else ""}if eq $last "{before}" -}}}}', _literal(text)]
    return [*lines, "{{- end -}}"]


def _literal(text: str) -> str:
    """A text as an action: Go reads JSON's escapes."""
    return f"{{{{- {json.dumps(text, ensure_ascii=False)} -}}}}"


def _template(tokenizer: TextTokenizer, year: int) -> ChatTemplate:
    return find_template("auto", tokenizer, Path(), ChatSpec(date=date(year, 1, 1).isoformat()))


def _writer(template: ChatTemplate) -> Write:
    return lambda messages: template.render(messages, answer=True)


def _messages(roles: Sequence[str], form: str = "{}") -> list[dict[str, str]]:
    return [{"role": role, "content": form.format(_text(number))} for number, role in enumerate(roles)]


def _text(number: int) -> str:
    return f"probe{number}words"
