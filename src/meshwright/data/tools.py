"""Tools and tool calls: normalized to one form, and converted to the form that a chat template expects.

The normal form is OpenAI's, with arguments as an object: a message's `tool_calls` are {"type": "function", "function":
{"name": ..., "arguments": {...}}}, `tools` are {"type": "function", "function": ...}. Templates differ: some write
arguments directly, some expect them as JSON text; some see a call only if the message has no content; some need calls
to have ids. A probe rendering determines the form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import parse_json


class ToolCallFormat(NamedTuple):
    """The form in which a template expects tool calls."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text."""
    without_content: bool = False
    """Whether a message with only calls has no content instead of an empty one, which transformers passes for null."""
    needs_ids: bool = False
    """Whether calls without ids are given ids."""


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """A record's tools: a list, or a list as JSON text. Raises UserError; the message starts with `where`."""
    tools = from_json(value, f"{where}: tools")
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{where}: tools are not a list of objects with name, description and parameters")
    return [_tool(tool, where) for tool in tools]


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """A message's tool calls: a list of calls or one call, or either as JSON text. Raises like `tools_of`."""
    calls = from_json(value, f"{where}: a call")
    return [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def in_form(messages: Sequence[Mapping[str, Any]], form: ToolCallFormat) -> list[dict[str, Any]]:
    """The messages in this form."""
    changed, waiting, count = [], list[str](), 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            if form.without_content and not message["content"]:
                del message["content"]
            if form.needs_ids:
                calls = [{**call, "id": call.get("id") or f"call{count + i:05}"} for i, call in enumerate(calls)]
                waiting, count = [call["id"] for call in calls], count + len(calls)
            if form.arguments_as_text:
                calls = [{**call, "function": _as_text(call["function"])} for call in calls]
            message["tool_calls"] = calls
        elif form.needs_ids and message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        changed.append(message)
    return changed


def form_of(write: Callable[[Sequence[Mapping[str, Any]]], str]) -> ToolCallFormat:
    """The form in which `write` expects tool calls: the first that omits nothing and writes JSON once."""
    question = {"role": "user", "content": "?"}
    call = {"type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "!"}]
    for bare, ids, text in product((False, True), repeat=3):
        form = ToolCallFormat(arguments_as_text=text, without_content=bare, needs_ids=ids)
        for probe in (messages, messages[:2]):
            try:
                written = write(in_form(probe, form))
            except UserError:
                continue
            if _says(written):
                return form
    return ToolCallFormat()


def _says(written: str) -> bool:
    """Whether the probe occurs, neither in Python's notation nor as text inside text."""
    whole = all(word in written for word in ("probe_name", "probe_key", "probe_value"))
    return whole and "'probe_key'" not in written and '\\"probe_key' not in written


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """OpenAI's form of a tool; a bare function is wrapped."""
    function = tool.get("function") if "function" in tool else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool has no name")
    if function is not tool:
        return {"type": "function", **tool}
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise UserError(f"{where}: a tool call is not an object with name and arguments but {type(call).__name__}")
    function = call.get("function") if isinstance(call.get("function"), Mapping) else call
    assert isinstance(function, Mapping)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: a call of a tool has no name")
    given = function.get("arguments", function.get("parameters"))
    arguments = from_json(given, f"{where}: the arguments of {name!r}") if given not in (None, "") else {}
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: the arguments of {name!r} are not an object but {type(arguments).__name__}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def from_json(value: Any, what: str) -> Any:
    """The value; JSON text is parsed."""
    return parse_json(value, what) if isinstance(value, str) else value
