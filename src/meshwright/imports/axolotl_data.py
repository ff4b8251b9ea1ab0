"""The data sets of an axolotl configuration, as sources of a recipe."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.imports.axolotl_entry import LEFT, PREPARE, Entry, keep
from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.names import READERS, reader_of
from meshwright.imports.reading import SHOWN, Reading
from meshwright.imports.rules import apply, without
from meshwright.spec.data import HUB, ROLES, THOUGHTS
from meshwright.spec.errors import UserError

FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
}
"""A type, without its style -> a source's format."""
PRETRAIN = "pretrain"
"""The type of texts that are streamed."""
VERBATIM = {"format": "{instruction}", "no_input_format": "{instruction}"}
"""Of a type that is a mapping: the prompt is the instruction as it is."""
VERBATIM_PAIR = {"prompt_format": "{prompt}", "chosen_format": "{chosen}", "rejected_format": "{rejected}"}
"""The same of preference pairs."""
PROMPT_COLUMNS = {
    "default": "prompt",
    "intel": "question",
    "icr": "input",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
    "argilla_chat": None,
}
"""A type of preference pairs, without its template -> the column of the prompt."""
WHOLE = ("ultra", "argilla_chat")
"""Types whose chosen and rejected are whole conversations."""
CHAT = {"roles_to_train": "data.chat.roles_to_train", "train_on_eos": "data.chat.train_on_eos"}
"""Keys of a data set -> settings of all sources."""
TEMPLATES = ("chatml", "llama3", "mistral", "qwen")
"""Templates that a recipe knows by the same name."""


def read_datasets(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Set the sources, and the settings about conversations on which all of them agree."""
    pairs = values.get("rl") == "dpo"
    entries = [
        _entry(reading, f"{key}.{number}", value, file, pairs=pairs)
        for key in ("pretraining_dataset", "datasets")
        for number, value in enumerate(_listed(values.get(key), f"{file}: {key}", key))
    ]
    for key, path in CHAT.items():
        _agree(reading, entries, key, path)
    _agree(reading, entries, "chat_template", "data.chat.template")
    sources, origins = [], []
    for entry in entries:
        for key, (value, origin) in entry.keys.items():
            apply(LEFT.get(key, without(PREPARE)), reading, value, origin)
        sources += list(_each(entry.source))
        origins += entry.used
    if sources:
        reading.set("data.sources", sources, "; ".join(dict.fromkeys(origins)))


def _listed(value: Any, where: str, key: str) -> list[Any]:
    """The data sets of a key; only the one for pretraining may be a name alone."""
    if value is None:
        return []
    if key == "pretraining_dataset" and isinstance(value, str):
        return [{"path": value}]
    entries = [value] if key == "pretraining_dataset" and isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(
            f"{where}={str(value)[:SHOWN]}: this value is not allowed: must be a list of mappings, as in "
            "[{path: tatsu-lab/alpaca, type: alpaca}]"
        )
    return entries


def _entry(reading: Reading, place: str, value: Mapping[str, Any], file: str, *, pairs: bool) -> Entry:
    entry = Entry(reading, f"{file}: {place}")
    reading.take(
        {f"{place}.{key}": inner for key, inner in value.items()},
        {f"{place}.{key}": keep(entry.keys, str(key)) for key in value},
        file,
    )
    if "path" not in entry.keys:
        raise UserError(f"{entry.place}.path is missing: the name of a data set on the Hub, or a file")
    _place(entry)
    if pairs:
        _preference(entry)
    else:
        _format(entry, PRETRAIN if place.startswith("pretraining") else "")
    return entry


def _each(source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A source for each of several files and subsets."""
    several = next((key for key in ("path", "subset") if isinstance(source.get(key), list)), None)
    if several is None:
        yield source
    else:
        for name in source[several]:
            yield from _each({**source, several: name})


def _place(entry: Entry) -> None:
    """Where the records are: on the Hub, or in a file here."""
    path, origin = entry.pop("path")
    files, files_origin = entry.pop("data_files", [])
    files = [files] if isinstance(files, str) else files
    kind, which = entry.pop("ds_type")
    if path in (*READERS.values(), "text") and files:  # the name of a reader of `datasets`, which reads files here
        kind, which = kind or path, origin
        _files(entry, files, f"{origin}; {files_origin}")
    elif _is_here(path):
        _files(entry, files or [path], files_origin if files else origin)
        if files:
            entry.reading.no_effect.append((origin, NoEffect.OVERRULED))
    else:
        if "://" in path:
            entry.reading.drop(origin, "download the files, and set data.sources to them")
        entry.say(origin, path=path if "://" in path else f"{HUB}{path}")
        if files:
            entry.reading.drop(
                files_origin,
                "a source on the Hub is read whole; to read only these files, download them and write their paths",
            )
        if kind:
            entry.reading.no_effect.append((which, NoEffect.UNREAD))
        _subset(entry)
        return
    for name in entry.source["path"]:
        if kind and kind != (ending := _kind(name)):
            entry.reading.drop(which, f"the ending of {name} tells what is in it: {ending or 'nothing known'}")
    entry.reading.claim(which, Always("the file's ending tells the same"))


def _kind(path: str) -> str:
    """axolotl's word for a file's kind, by its ending."""
    return reader_of(path) or ("text" if path.lower().endswith((".txt", ".txt.gz", ".txt.zst")) else "")


def _is_here(path: str) -> bool:
    """Whether a path is one of this machine; a name on the Hub has at most an owner before it, and no file's ending."""
    return "://" not in path and (path.startswith((".", "/", "~")) or path.count("/") > 1 or bool(_kind(path)))


def _files(entry: Entry, files: list[Any], origin: str) -> None:
    """Files of this machine, a source each; only folders have splits."""
    names = [str(name) for name in files]
    entry.say(origin, path=names)
    if _kind(names[0]):
        for key, (value, key_origin) in [(key, entry.pop(key)) for key in ("split", "name") if key in entry.keys]:
            if value != "train":
                entry.reading.drop(key_origin, f"a file has no {key}; it is read whole")
            else:
                entry.reading.claim(key_origin, Always("a file is read whole"))
    else:
        _subset(entry)


def _subset(entry: Entry) -> None:
    for key, ours in (("split", "split"), ("name", "subset")):
        if key in entry.keys:
            value, origin = entry.pop(key)
            entry.say(origin, **{ours: value})


def _format(entry: Entry, usual: str) -> None:
    """The records' format and the names of their columns."""
    kind, origin = entry.pop("type", usual)
    if isinstance(kind, dict):
        _user_defined(entry, kind, origin)
        return
    base = kind.split(":")[0]
    form = "text" if base == PRETRAIN else FORMATS.get(base)
    if form:
        entry.say(origin, format=form)
    elif kind:
        entry.reading.drop(origin, f"supported: {', '.join(FORMATS)}; the format is told by the columns")
    if base == "alpaca":
        entry.reading.notes.append(
            f"{origin}: axolotl writes its prompt ('### Instruction:', '### Input:'); the recipe makes messages, whose "
            "template cannot tell the two apart; for the same words, write records of prompt and completion"
        )
    if base == "chat_template":
        entry.column("messages", "field_messages", "messages")
        entry.column("tools", "field_tools", "tools")
        _messages(entry)
    elif form == "text" and (key := "field" if base == "completion" else "text_column") in entry.keys:
        name, column_origin = entry.pop(key)
        entry.say(column_origin, **({} if name == "text" else {"text_key": name}))


def _messages(entry: Entry) -> None:
    """The names of a message's parts and of its roles, which a recipe knows by a few names each."""
    known = {"role": ("role", "from"), "content": ("content", "value")}
    mapping, origin = entry.pop("message_property_mappings", {})
    for ours, theirs in mapping.items():
        if theirs not in known.get(str(ours), (ours,)):
            entry.reading.drop(f"{origin}: {ours}={theirs}", f"name it {' or '.join(known.get(str(ours), (ours,)))}")
    entry.reading.claim(origin, Always("parts with these names are read"))
    for key, names in (
        ("message_field_role", known["role"]),
        ("message_field_content", known["content"]),
        ("field_thinking", THOUGHTS),
        ("template_thinking_key", ("reasoning_content",)),
        ("message_field_training", ("train", "training", "weight")),
    ):
        value, name_origin = entry.pop(key, names[0])
        if value not in names:
            entry.reading.drop(name_origin, f"a message's part of this kind is named {' or '.join(names)}")
        else:
            entry.reading.claim(name_origin, Always("a part with this name is read"))
    roles, origin = entry.pop("roles", {})
    for target, names in roles.items():
        other = [
            name for name in (names if isinstance(names, list) else [names]) if ROLES.get(str(name), name) != target
        ]
        if other:
            entry.reading.drop(
                f"{origin}: {target}={other}", f"rename the roles; known besides ours: {', '.join(ROLES)}"
            )
    entry.reading.claim(origin, Always("roles with these names are known"))


def _user_defined(entry: Entry, kind: Mapping[str, Any], origin: str) -> None:
    """A prompt of the user's own: the columns are kept, the words around them are not, unless there are none."""
    left = dict(kind)
    given = {f"type.{key}": (left.pop(key), f"{entry.place}.type.{key}={kind[key]}") for key in COLUMNS if key in left}
    verbatim = all(left.get(key) == text for key, text in VERBATIM.items())
    ours = ("prompt", "input", "completion", "system") if verbatim else ("instruction", "input", "output", "system")
    entry.say(origin, format="prompt_completion" if verbatim else "alpaca")
    entry.keys |= given
    for name, (key, usual) in zip(ours, COLUMNS.items(), strict=True):
        if verbatim and name in ("input", "system"):
            continue  # which such records do not have
        entry.column(name, f"type.{key}", usual)
    for key, value in left.items():
        if value and not (verbatim and key in VERBATIM):
            entry.reading.drop(
                f"{entry.place}.type.{key}={value}",
                "the recipe makes messages, which data.chat.template writes; put these words into a template of your "
                "own",
            )


COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
}
"""Keys of a user's own prompt that name columns, and the usual ones."""


def _preference(entry: Entry) -> None:
    """Preference pairs."""
    kind, origin = entry.pop("type", "")
    entry.say(origin, format="preference")
    if isinstance(kind, dict):
        _own_pairs(entry, kind)
        return
    template, _, style = str(kind).partition(".")
    if template == "chat_template" and style == "default":
        entry.column("prompt", "field_messages", "messages")
        _messages(entry)
        entry.reading.notes.append(
            f"{origin}: messages come in lists, text with a prompt of text; write a chosen or rejected message by "
            "itself as a list of one"
        )
    elif template in ("chatml", "llama3", "chat_template") and (style or "default") in PROMPT_COLUMNS:
        column = PROMPT_COLUMNS[style or "default"]
        entry.say(origin, **({} if column == "prompt" else {"columns": {"prompt": column}}))
        if template != "chat_template":
            entry.keys.setdefault("chat_template", (template, origin))
        if style not in WHOLE:
            entry.reading.drop(
                origin, f"pairs of plain text are read without the template {template}; make their sides messages"
            )
    elif kind:
        entry.reading.drop(
            origin, f"supported: chat_template.default, and chatml or llama3 with .{', .'.join(PROMPT_COLUMNS)}"
        )
    for side in ("chosen", "rejected"):
        entry.column(side, f"field_{side}", side)


def _own_pairs(entry: Entry, kind: Mapping[str, Any]) -> None:
    """Pairs whose prompt is the user's own: the columns are kept, the words around them are not."""
    for key, value in kind.items():
        where = f"{entry.place}.type.{key}={value}"
        ours = str(key).removeprefix("field_")
        if str(key).startswith("field_") and ours in ("prompt", "chosen", "rejected"):
            entry.keys[f"type.{key}"] = value, where
            entry.column(ours, f"type.{key}", ours)
        elif value and VERBATIM_PAIR.get(str(key)) != value:
            entry.reading.drop(where, "pairs of plain text are read as they are; write these words into the records")


def _agree(reading: Reading, entries: list[Entry], key: str, path: str) -> None:
    """Set what is one setting for all sources, if every data set says the same; report it otherwise."""
    given = [entry.keys.pop(key, (None, entry.place)) for entry in entries]
    values = {json.dumps(value, default=str) for value, _ in given}
    for value, origin in given:
        if value is None:
            continue
        if len(values) > 1:
            reading.drop(origin, f"{path} is one setting for all sources, and other data sets differ")
        else:
            _set_chat(reading, path, value, origin)


def _set_chat(reading: Reading, path: str, value: Any, origin: str) -> None:
    if path == "data.chat.template":
        chat_template(reading, value, origin)
    elif path == "data.chat.train_on_eos" and value not in ("turn", "last", "none"):
        reading.drop(origin, "supported: turn, last, none")
    elif path == "data.chat.roles_to_train":
        reading.set(path, [ROLES.get(str(role), role) for role in value], origin)
    else:
        reading.set(path, value, origin)


def chat_template(reading: Reading, value: Any, origin: str) -> None:
    """A chat template by its name."""
    if value in TEMPLATES:
        reading.set("data.chat.template", value, origin)
    elif value == "tokenizer_default":
        reading.claim(origin, Has("data.chat.template", "auto"))
    else:
        reading.drop(origin, "the tokenizer's template is used; set data.chat.template to a file with this one")
