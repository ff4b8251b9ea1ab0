"""Tool calls in a model's text: their form, found in the model's chat template; read from answers, and enforced.

The template renders two probe calls. From its output follow the texts before, between and after calls, and their form:
a JSON object with name and arguments (Hermes, Qwen, Mistral, Llama 3), or a name and then its arguments as JSON
(DeepSeek). Calls in other forms are not read.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.tools import calls_of
from meshwright.serve.grammar import JSON_OPTIONS
from meshwright.spec.errors import UserError

PROBES = (("probe_name", {"probe_key": "probe_value"}), ("probe_other", {"probe_more": "probe_thing"}))
ARGUMENTS = ("arguments", "parameters")
"""Names of a call's arguments."""
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_NAME = re.compile(r"[^\s<>{}\[\]\"`]+")
_ID = re.compile(r"call0000\d")
"""The ids of probes, for templates that demand some (`in_form`)."""
_DECODER = json.JSONDecoder()

PlacedCall = tuple[str, dict[str, Any], int]
"""A call's name, its arguments and its end in the text."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The form of calls in a model's answers."""

    before: str
    """The text before the first call; empty if an answer with a call is only a JSON object."""
    between: str
    after: str
    keys: tuple[str, str] | None = None
    """The names of name and arguments in a call's JSON object; None if a call is a name, then `middle`, then its
    arguments."""
    middle: str = ""
    several: bool = True
    """Whether one answer can have several calls."""

    @property
    def texts(self) -> str:
        """All its texts."""
        return self.before + self.between + self.after + self.middle

    @property
    def opening(self) -> str:
        """The text by which an answer's first call is recognized."""
        tag = _TAG.search(self.before)
        return tag[0] if tag else self.before.strip()

    def call_at(self, text: str, place: int) -> PlacedCall | None:
        """The call at this place, if it is complete and valid."""
        try:
            if self.keys is not None:
                value, end = _DECODER.raw_decode(text, place)
                arguments = next((value[key] for key in ARGUMENTS if key in value), {})
                name = value["name"]
            else:
                match = _NAME.match(text, place)
                middle = match and _flexible(self.middle).match(text, match.end())
                if not match or not middle:
                    return None
                name = match[0]
                arguments, end = _DECODER.raw_decode(text, middle.end())
            (call,) = calls_of({"name": name, "arguments": arguments}, "")
        except (ValueError, RecursionError, TypeError, KeyError):  # no JSON, or that of something else
            return None
        return call["function"]["name"], call["function"]["arguments"], end

    def lark(self, tools: Sequence[Mapping[str, Any]], token_id: Callable[[str], int | None], *, many: bool) -> str:
        """llguidance's grammar of answers that are one call of one of these tools, or one or more (`many`)."""

        def quoted(text: str) -> str:
            """A text; special tokens in it by their ids."""
            parts, specials = re.split(r"(<[^<>\s]+>|\[/?[A-Z_]+\])", text), []
            for part in filter(None, parts):
                number = token_id(part)
                specials.append(json.dumps(part, ensure_ascii=False) if number is None else f"<[{number}]>")
            return " ".join(specials) or '""'

        rules = []
        for tool in tools:
            name, schema = tool["function"]["name"], dict(tool["function"].get("parameters") or {"type": "object"})
            if self.keys is None:
                rules.append(f"{json.dumps(name)} {quoted(self.middle)} %json {_schema(schema)}")
                continue
            shared = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
            whole = {"type": "object", "properties": {self.keys[0]: {"const": name}, self.keys[1]: schema}}
            whole |= {"required": list(self.keys), "additionalProperties": False, **shared}
            rules.append(f"%json {_schema(whole)}")
        more = f" ({quoted(self.between)} call)*" if many and self.several else ""
        alternatives = " | ".join(f"tool{number}" for number in range(len(rules)))
        lines = [f"start: {quoted(self.before)} call{more} {quoted(self.after)}", f"call: {alternatives}"]
        return "\n".join([*lines, *(f"tool{number}: {rule}" for number, rule in enumerate(rules))]) + "\n"


@dataclass(frozen=True)
class ToolCall:
    """One call in an answer."""

    id: str
    name: str
    arguments: str
    """As JSON."""

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Separates one answer's words from its calls while it is written. Whatever is no complete call is words."""

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        """`names`: of the tools. A JSON object without a text before it is a call only if it names one of them."""
        self._form, self._names = form, names
        self._held, self._begun, self._place = "", False, 0
        self._spoken = False
        self.calls: list[ToolCall] = []

    def add(self, text: str) -> list[str | ToolCall]:
        """The words and calls that are certain after this text."""
        self._held += text
        parts: list[str | ToolCall] = []
        if not self._begun:
            parts += self._words_before()
        if self._begun:
            parts += self._new_calls()
        return parts

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the answer."""
        rest = self._held
        if self.calls:
            after = _flexible(self._form.after).match(rest, self._place)
            rest = rest[after.end() if after else self._place :].strip()
        self._held = ""
        return [rest] if rest else []

    def _words_before(self) -> list[str]:
        """The words before the first call, as far as they are certain; sets `_begun` at the call."""
        opening, held = self._form.opening, self._held
        if not opening:
            if self._spoken or not held.lstrip():
                place = len(held) if self._spoken else 0
            else:
                self._begun = held.lstrip().startswith("{")
                place = 0 if self._begun else len(held)
        elif (place := held.find(opening)) >= 0:
            self._begun = True
        else:
            keep = next((n for n in range(len(opening) - 1, 0, -1) if held.endswith(opening[:n])), 0)
            place = len(held) - keep
        end = len(held[:place].rstrip()) if opening or self._begun else place
        words, self._held = held[:end], held[end:]
        self._spoken = self._spoken or bool(words)
        return [words] if words else []

    def _new_calls(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while True:
            gap = self._form.between if self.calls else self._form.before
            start = _flexible(gap).match(self._held, self._place)
            call = start and self._form.call_at(self._held, start.end())
            if not call or (not self._form.opening and call[0] not in self._names):
                return calls
            # Mistral's template demands ids of nine letters and digits; others take any.
            number = f"c{secrets.token_hex(4)}"
            self.calls.append(ToolCall(number, call[0], json.dumps(call[1], ensure_ascii=False)))
            calls.append(self.calls[-1])
            self._place = call[2]


def call_form(write: Callable[[Sequence[Mapping[str, Any]]], str]) -> CallForm | None:
    """The form in which `write` renders the calls of one assistant's turn; None if it is none of those known."""
    try:
        one = write([_call(*PROBES[0])])
    except UserError:
        return None
    first = _placed(one, *PROBES[0])
    if first is None:
        return None
    keys, start, end, middle = first
    form = CallForm(
        before=one[:start].lstrip(), between=";", after=one[end:].rstrip(), keys=keys, middle=middle, several=False
    )
    try:
        two = write([_call(*probe) for probe in PROBES])
    except UserError:
        return form
    places = [_placed(two, *probe) for probe in PROBES]
    if places[0] is None or places[1] is None or two[: places[0][1]].lstrip() != form.before:
        return form
    return CallForm(
        before=form.before,
        between=two[places[0][2] : places[1][1]],
        after=two[places[1][2] :].rstrip(),
        keys=keys,
        middle=middle,
    )


def _placed(text: str, name: str, arguments: Mapping[str, Any]) -> tuple[tuple[str, str] | None, int, int, str] | None:
    """(keys, start, end, middle) of a probe's call in a text."""
    named = text.find(name)
    for start in [match.start() for match in re.finditer(r"\{", text[: max(0, named)])]:
        value, end = _decoded(text, start)
        if isinstance(value, dict) and name in value.values() and arguments in value.values():
            places = {json.dumps(held): key for key, held in value.items()}
            return (places[json.dumps(name)], places[json.dumps(arguments)]), start, end, ""
    opened = text.find("{", named)
    value, end = _decoded(text, opened) if named >= 0 and opened >= 0 else (None, 0)
    if value != arguments:
        return None
    return None, named, end, text[named + len(name) : opened]


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, start)
    except ValueError:
        return None, start


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _flexible(text: str) -> re.Pattern[str]:
    """A pattern of the text with any whitespace between its words and around them, and any ids of calls."""
    return re.compile(r"\s*" + r"\s*".join(_ID.sub(r"\\w*", re.escape(word)) for word in text.split()) + r"\s*")


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": JSON_OPTIONS, **schema})
