"""Fine-tuning records: their format, detected from the columns, and one common form.

A record in that form is JSON text, one of

    {"messages": [{"role": ..., "content": ...}, ...], "given": k}    a conversation; its first k messages carry no
                                                                      loss, nor do messages with "weight": 0; those
                                                                      with "weight": 1 do, whatever their role
    {"prompt": text, "completion": text}
    {"input_ids": [...], "labels": [...]}                             tokens; a label is its own token or -100
    {"chosen": record, "rejected": record}                            a preference, each side one of the first two

A conversation may also have "tools", and "variables" of the chat template: the record's documents and
`chat_template_kwargs` (as trl and ms-swift pass them).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.labels import FLAGS, MASKS, PLACES, ignore, labels_of, message_weight, record_weight
from meshwright.data.structs import has_structs, leaves_out, with_required_nulls
from meshwright.data.tools import calls_of, from_json, tools_of
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
MEDIA = {
    **dict.fromkeys(("image", "images"), "images are not supported"),
    **dict.fromkeys(("audio", "audios"), "audio is not supported"),
    **dict.fromkeys(("video", "videos"), "videos are not supported"),
}
"""Columns, and fields of a message, beside text that they belong to."""
REFUSED = {
    **MEDIA,
    **{f"rejected_{name}": reason for name, reason in MEDIA.items()},
    "rejected_tools": "other tools for the rejected answer are not supported",
    **dict.fromkeys(("label", "kto_tag"), "KTO labels are not supported; make pairs of chosen and rejected"),
}
"""Known columns that cannot be used, and why."""
SWIFT = ("rejected_response", "rejected_messages")
"""The second side of a preference beside `messages`, as in ms-swift."""
OWNERS = {
    "history": ("instruction and output", "alpaca"),
    **dict.fromkeys(SWIFT, ("preferences", "preference")),
    **dict.fromkeys(MASKS, ("input_ids", "tokenized")),
}
"""Columns that belong to one format: what it is called, and its name."""
VARIABLES = ("documents", "chat_template_kwargs")
"""Columns for the chat template."""
FURTHER = ("prompt", "input", "history", "system", "labels", "tools", "functions", "weight", "train", "messages")
FURTHER += (*REFUSED, *SWIFT, *VARIABLES, *MASKS, *PLACES, "attention_mask")
"""Further columns that a format may have."""
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Arguments of transformers' `apply_chat_template` that a record cannot set."""
STRUCTS = "structs"
"""The note of a record without the keys that were null in a struct."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a message's content (OpenAI's)."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


def format_of(columns: Iterable[str], text_key: str, where: str) -> Format:
    """The format with these columns; text if there is none, so that a missing text key is reported later.

    Raises UserError if they match several formats, or nearly match one.
    """
    names = set(columns)
    if "messages" in names and names & set(SWIFT):
        return "preference"
    formats: list[Format] = [format for format, needed in COLUMNS.items() if names.issuperset(needed)]
    if text_key in names:
        formats.append("text")
    if len(formats) > 1:
        raise UserError(f"{where}: its columns match {' and '.join(formats)}; set the source's format")
    if formats:
        return formats[0]
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
    fields = _paired(fields, where) if format == "preference" else fields
    lacking = [column for column in COLUMNS[format] if fields.get(column) is None]
    if lacking:
        raise UserError(f"{where}: has no {lacking[0]!r}, which format {format} needs (it has {', '.join(fields)})")
    refuse(fields, REFUSED, where)
    _check_belongs(fields, format, where)
    record = _MAKERS[format](fields, where)
    tools = [tool for name in ("tools", "functions") if fields.get(name) for tool in tools_of(fields[name], where)]
    variables = _variables(fields, where)
    for side in (record["chosen"], record["rejected"]) if format == "preference" else (record,):
        if tools and format != "tokenized":
            side["tools"] = tools
            _keep_required_nulls(side)
        if variables and "messages" not in side:
            column = next(name for name in VARIABLES if fields.get(name))
            raise UserError(f"{where}: column {column!r} is for a chat template, which this format does not use")
        if variables:
            side["variables"] = variables
    if record_weight(fields, where) == 0:
        record["weight"] = 0
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not Unicode text: a lone surrogate") from error
    # The record's own messages and calls are plain objects, whose null fields mean nothing.
    return Content(text, STRUCTS if has_structs(fields) and leaves_out([record, fields.get("tools")]) else "")


def refuse(fields: Mapping[str, Any], columns: Mapping[str, str], where: str) -> None:
    """Raise UserError if one of the columns has a value; `columns` says why it cannot be used."""
    if columns.keys().isdisjoint(fields):
        return
    for column, reason in columns.items():
        if fields.get(column) not in (None, [], {}, ""):
            raise UserError(f"{where}: column {column!r}: {reason}; {ignore(column)}")


def _check_belongs(fields: Mapping[str, Any], format: Format, where: str) -> None:
    """Raise UserError for a column that another format has."""
    for column, (owner, owning) in OWNERS.items():
        if format != owning and fields.get(column) not in (None, [], ""):
            raise UserError(f"{where}: column {column!r} belongs to {owner}, not to format {format}; {ignore(column)}")


def _paired(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """ms-swift's preference as chosen and rejected: `rejected_messages` replace the conversation, `rejected_response`,
    a text or messages, what follows its last question."""
    talk, other, response = (fields.get(name) for name in ("messages", "rejected_messages", "rejected_response"))
    if talk is None or fields.get("chosen") is not None or (other is None and response is None):
        return fields
    if other is None:
        questions = [number for number, message in enumerate(_messages(talk, where)) if message["role"] == "user"]
        answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        if not questions or not isinstance(answer, list):
            raise UserError(f"{where}: 'rejected_response' must be a text or messages, after a question of the user")
        other = [*talk[: questions[-1] + 1], *answer]
    return {**fields, "chosen": talk, "rejected": other, **dict.fromkeys(SWIFT)}


def _variables(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record's variables of the chat template."""
    if not any(fields.get(name) for name in VARIABLES):
        return {}
    documents, given = (from_json(fields.get(name) or None, f"{where}: {name}") for name in VARIABLES)
    if documents and not (isinstance(documents, list) and all(isinstance(one, Mapping) for one in documents)):
        raise UserError(f"{where}: 'documents' must be a list of objects, each with title and text")
    if given and not isinstance(given, Mapping):
        raise UserError(f"{where}: 'chat_template_kwargs' must be an object")
    reserved = next((name for name in given or () if name in RESERVED), None)
    if reserved:
        raise UserError(f"{where}: chat_template_kwargs cannot set {reserved!r}; remove it")
    return {**({"documents": documents} if documents else {}), **(given or {})}


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
    question = _string(fields, "instruction", where)
    if fields.get("input"):
        question += "\n\n" + _string(fields, "input", where)
    messages = []
    for turn in fields.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise UserError(f"{where}: 'history' is not a list of pairs of question and answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": question})
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
    ids, labels = labels_of(fields, where)
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
    thought = next((thinking for name in THOUGHTS if (thinking := fields.pop(name, None))), None)
    if thought is not None:
        if not isinstance(thought, str):
            raise UserError(f"{where}: its thought is not text but {type(thought).__name__}")
        made["reasoning_content"] = thought
    refuse(fields, MEDIA, where)
    if (weight := message_weight(fields, known, where)) is not None:
        made["weight"] = weight
    return {**{name: value for name, value in fields.items() if name not in FLAGS}, **made} if fields else made


def _joined(parts: list[Any], where: str) -> str:
    """Contents in parts of {"type": "text", "text": ...}."""
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: a part of its content is not text but {kind}")
        refuse(part, MEDIA, where)
        if marked := [name for name in FLAGS if part.get(name) is not None]:
            raise UserError(f"{where}: {marked[0]!r} of a part of its content is not supported; set it on the message")
    return "".join(part["text"] for part in parts)


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(fields[key], str):
        raise UserError(f"{where}: {key!r} is not a string but {type(fields[key]).__name__}")
    return fields[key]
