"""The files of a tokenizer in a Hugging Face directory, besides `tokenizer.json`: special tokens and chat template."""

from collections.abc import Mapping
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import parse_json

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of the tokenizers trained here."""

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Its names in published tokenizers, tried in this order if their files do not give it."""

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    CHAT_TEMPLATE,
)
"""The files of a tokenizer in a Hugging Face directory (config.json is the model's)."""


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names."""
    given = {key: value for key, value in config.items() if key.endswith("_token")}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    return {key: token for key, token in tokens.items() if isinstance(token, str)}


def chat_template(files: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> str | None:
    """The Jinja source of the chat template; None if there is none. Raises `UserError` if it is not one text."""
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: {CHAT_TEMPLATE} is not UTF-8 at byte {error.start}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = [template for template in source if isinstance(template, dict) and "template" in template]
        if len(named) != len(source):
            raise UserError(
                f"{where}: chat_template in tokenizer_config.json is a list with entries other than name and template"
            )
        source = {template.get("name"): template["template"] for template in named}.get("default")
    if not isinstance(source, str | None):
        raise UserError(f"{where}: chat_template in tokenizer_config.json is not text but {type(source).__name__}")
    return source


def end_of_text(files: Mapping[str, bytes], ids: Mapping[str, int], where: str) -> int:
    """Id of the end-of-text token: from the files, else a published name that occurs in the vocabulary.

    Raises `UserError` if there is none.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(files, name, where).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str) or token not in ids:
                raise UserError(f"{where}: {name} has eos_token {token!r}, which is not in tokenizer.json")
            return ids[token]
    eos = read_json(files, "generation_config.json", where).get("eos_token_id")
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    if eos is not None:
        if not isinstance(eos, int) or eos not in ids.values():
            raise UserError(f"{where}: generation_config.json has eos_token_id {eos}, which is not in tokenizer.json")
        return eos
    for token in END_OF_TEXT_NAMES:
        if token in ids:
            return ids[token]
    raise UserError(
        f"{where}: no end-of-text token (none of {', '.join(END_OF_TEXT_NAMES)} is in the vocabulary); set "
        "eos_token in a tokenizer_config.json beside tokenizer.json"
    )


def read_json(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """The object in a file; empty if there is no such file. Raises `UserError` if it is none."""
    try:
        text = files.get(name, b"{}").decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {name} is not UTF-8 at byte {error.start}") from error
    content = parse_json(text, f"{where}: {name}")
    if not isinstance(content, dict):
        raise UserError(f"{where}: {name} is not a JSON object")
    return content
