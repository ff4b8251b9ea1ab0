"""Fine-tuning records: their format, detected from the columns, and one common form.

A record in that form is JSON text, one of

    {"messages": [{"role": ..., "content": ...}, ...], "given": k}    a conversation; its first k messages carry no
                                                                      loss, nor do messages with "weight": 0
    {"prompt": text, "completion": text}
    {"input_ids": [...], "labels": [...]}                             tokens; a label is its own token or -100
    {"chosen": record, "rejected": record}                            a preference, each side one of the first two
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.structs import has_structs, leaves_out, with_required_nulls
from meshwright.data.tools import calls_of, tools_of
from meshwright.spec.data import ROLES, THOUGHTS, Format
from meshwright.spec.errors import UserError
from meshwright.spec.problems import did_you_mean

COLUMNS: dict[Format, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "tokenized": ("input_ids",),
}
"""The columns that identify a format."""
FURTHER = ("prompt", "input", "history", "system", "labels", "tools", "functions", "weight", "train")
"""Further columns that a format may have."""
REFUSED = {
    "label": "KTO labels are not supported; make pairs of chosen and rejected",
    "images": "images are not supported",
    "audios": "audio is not supported",
    "videos": "images are not supported",
}
"""Known columns that cannot be used, and why."""
FURTHER += tuple(REFUSED)
STRUCTS = "structs"
"""The note of a record without the keys that were null in a struct."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


def format_of(columns: Iterable[str], text_key: str, where: str) -> Format:
    """The format with these columns; text if there is none, so that a missing text key is reported later.

    Raises UserError if they match several formats, or nearly match one.
    """
    names = set(columns)
    found: list[Format] = [format for format, needed in COLUMNS.items() if names.issuperset(needed)]
    if text_key in names:
        found.append("text")
    if len(found) > 1:
        raise UserError(f"{where}: its columns match {' and '.join(found)}; set the source's format")
    if found:
        return found[0]
    for needed in COLUMNS.values():
        lacking = set(needed) - names
        for name in sorted(names - set(needed)):
            near = did_you_mean(name, lacking, likeness=0.75)
            if near and len(lacking) == 1:
                raise UserError(f"{where}: unknown column {name!r}{near}")
    return "text"


def renamed(fields: Mapping[str, Any], columns: Sequence[tuple[str, str | None]]) -> Mapping[str, Any]:
    """The fields under our names, according to the source's `columns`."""
    if not columns:
        return fields
    theirs = {name for _, name in columns} | {ours for ours, _ in columns}
    rest = {key: value for key, value in fields.items() if key not in theirs}
    return rest | {ours: fields[name] for ours, name in columns if name is not None and name in fields}


class Content(NamedTuple):
    """What is read from a line or row."""

    text: str
    """The text, or the JSON text of a record."""
    note: str = ""
    """`structs` if keys that were null in a struct of an Arrow file are left out of it."""


def record_content(fields: Mapping[str, Any], format: Format, where: str) -> Content:
    """A line or row in the common form of records. Raises UserError; the message starts with `where`."""
    lacking = [column for column in COLUMNS[format] if fields.get(column) is None]
    if lacking:
        raise UserError(f"{where}: has no {lacking[0]!r}, which format {format} needs (it has {', '.join(fields)})")
    for column, why in REFUSED.items():
        if fields.get(column) not in (None, [], ""):
            raise UserError(
                f"{where}: column {column!r}: {why}; to ignore it, set columns={{{column}: null}} in the source"
            )
    if fields.get("history") and format != "alpaca":
        raise UserError(f"{where}: column 'history' belongs to instruction and output, not to format {format}")
    record = _MAKERS[format](fields, where)
    tools = [tool for name in ("tools", "functions") if fields.get(name) for tool in tools_of(fields[name], where)]
    if tools and format in ("messages", "sharegpt", "prompt_completion", "alpaca", "preference"):
        for side in (record["chosen"], record["rejected"]) if format == "preference" else (record,):
            side["tools"] = tools
            _keep_required_nulls(side)
    if _weight(fields, where) == 0:
        record["weight"] = 0
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not Unicode text: a lone surrogate") from error
    # The record's own messages and calls are plain objects, whose null fields mean nothing.
    return Content(text, STRUCTS if has_structs(fields) and leaves_out([record, fields.get("tools")]) else "")


def _keep_required_nulls(record: dict[str, Any]) -> None:
    """Put back the null arguments that the record's own tools require."""
    functions = [tool["function"] for tool in record["tools"]]
    schemas = {function["name"]: function.get("parameters") for function in functions}
    for call in (call for message in record.get("messages", []) for call in message.get("tool_calls", [])):
        function = call["function"]
        function["arguments"] = with_required_nulls(function["arguments"], schemas.get(function["name"]))


def _of_messages(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"messages": _messages(fields["messages"], where), "given": 0}


def _of_sharegpt(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    messages = _messages(fields["conversations"], where)
    return {"messages": _system(fields, where) + messages, "given": 0}


def _of_alpaca(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    asked = _string(fields, "instruction", where)
    if fields.get("input"):
        asked += "\n\n" + _string(fields, "input", where)
    messages = []
    for turn in fields.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise UserError(f"{where}: 'history' is not a list of pairs of question and answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": _string(fields, "output", where)})
    return {"messages": _system(fields, where) + messages, "given": 0}


def _system(fields: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The system message of a record that has its own column for it."""
    return [{"role": "system", "content": _string(fields, "system", where)}] if fields.get("system") else []


def _of_prompt_completion(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    if isinstance(fields["prompt"], str):
        return {"prompt": fields["prompt"], "completion": _string(fields, "completion", where)}
    prompt = _messages(fields["prompt"], where)
    return {"messages": prompt + _messages(fields["completion"], where), "given": len(prompt)}


def _of_tokenized(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    ids, labels = fields["input_ids"], fields.get("labels")
    labels = ids if labels is None else labels
    if not (_is_integers(ids) and _is_integers(labels)):
        raise UserError(f"{where}: input_ids and labels must be lists of whole numbers")
    if len(ids) != len(labels) or any(label not in (token, -100) for token, label in zip(ids, labels, strict=True)):
        raise UserError(f"{where}: every label must be its own token or -100 (labels are shifted during training)")
    return {"input_ids": ids, "labels": labels}


def _of_preference(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    prompt, sides = fields.get("prompt"), (fields["chosen"], fields["rejected"])
    if all(isinstance(side, str) for side in sides):
        if not isinstance(prompt, str):
            raise UserError(f"{where}: chosen and rejected are text, so the prompt must be text too")
        chosen, rejected = ({"prompt": prompt, "completion": side} for side in sides)
        return {"chosen": chosen, "rejected": rejected}
    chosen, rejected = (_messages(side, where) for side in sides)
    if chosen[:1] and chosen[0]["role"] != "assistant":  # both hold the whole conversation
        given = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), 0)
        before: list[dict[str, Any]] = []
    elif prompt is None:
        raise UserError(f"{where}: has no 'prompt', and chosen and rejected do not begin with one")
    else:
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, where)
        given = len(before)
    if not given:
        raise UserError(f"{where}: chosen and rejected have no prompt in common, or do not differ")
    return {
        "chosen": {"messages": before + chosen, "given": given},
        "rejected": {"messages": before + rejected, "given": given},
    }


_MAKERS = {
    "messages": _of_messages,
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "prompt_completion": _of_prompt_completion,
    "tokenized": _of_tokenized,
    "preference": _of_preference,
}


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f"{where}: a conversation must be a list of messages, each with role and content")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with OpenAI's field names, without null fields."""
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is not an object with role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    role, content = fields.pop("from", None), fields.pop("value", None)
    role, content = fields.pop("role", role), fields.pop("content", content)
    known = ROLES.get(role, role) if isinstance(role, str) else None
    if known not in KNOWN_ROLES:
        near = did_you_mean(str(role), (*ROLES, *KNOWN_ROLES))
        raise UserError(f"{where}: role {role!r} is not one of {', '.join(KNOWN_ROLES)}{near}")
    calls = fields.pop("tool_calls", None) or fields.pop("function_call", None)
    if role == "function_call":
        calls, content = content, None
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str) and not (content is None and calls):
        raise UserError(f"{where}: its content is not text but {type(content).__name__}")
    made: dict[str, Any] = {"role": known, "content": content or ""}
    if calls:
        made["tool_calls"] = calls_of(calls, where)
    thought = next((found for name in THOUGHTS if (found := fields.pop(name, None))), None)
    if thought is not None:
        if not isinstance(thought, str):
            raise UserError(f"{where}: its thought is not text but {type(thought).__name__}")
        made["reasoning_content"] = thought
    if _weight(fields, where) == 0:
        made["weight"] = 0
    for name in ("weight", "train"):
        fields.pop(name, None)
    return {**fields, **made}


def _weight(fields: Mapping[str, Any], where: str) -> int:
    """0 if a record or message carries no loss, else 1."""
    weights = []
    for name in ("weight", "train"):
        value = fields.get(name)
        value = _TEXT_WEIGHTS.get(value.strip().lower(), value) if isinstance(value, str) else value
        weights.append(value)
        if value not in (None, 0, 1):
            raise UserError(
                f"{where}: {name!r} is {value!r}, but must be 0 (no loss) or 1; "
                f"to ignore the column, set columns={{{name}: null}} in the source"
            )
    return 0 if 0 in weights else 1


_TEXT_WEIGHTS = {"": None, "0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
"""Weights as written in .csv files."""


def _joined(parts: list[Any], where: str) -> str:
    """Contents in parts of {"type": "text", "text": ...}."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: a part of its content is not text")
    return "".join(part["text"] for part in parts)


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(fields[key], str):
        raise UserError(f"{where}: {key!r} is not a string but {type(fields[key]).__name__}")
    return fields[key]


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, int) and number is not True for number in value)
