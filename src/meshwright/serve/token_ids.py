"""The special token ids in a model's files, preserved in every export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.files import regular

GENERATION = "generation_config.json"

TokenIds = dict[str, int | list[int] | None]


def end_ids(tokenizer: TextTokenizer, *configs: Mapping[str, Any]) -> set[int]:
    """Every token that ends a text: the tokenizer's own, and those in its generation_config.json and in `configs` (of
    the model). A file is used only if it includes the tokenizer's own; else its ids belong to another tokenizer."""
    declared = [_ids(config.get("eos_token_id")) for config in (_generation(tokenizer), *configs)]
    return {tokenizer.eos_id}.union(*(ids for ids in declared if tokenizer.eos_id in ids))


def token_ids(tokenizer: TextTokenizer, config: Mapping[str, Any]) -> TokenIds:
    """The special tokens of an export: beginning, ends and padding, from the model's `config` and the tokenizer's
    files; null if neither has one, because transformers has a default for every family."""
    ends = end_ids(tokenizer, config)
    ordered = [tokenizer.eos_id, *sorted(ends - {tokenizer.eos_id})]
    ids: TokenIds = {"eos_token_id": ordered if len(ordered) > 1 else ordered[0]}
    # The model's own ids do not apply to a tokenizer that it was not trained with.
    same = tokenizer.eos_id in _ids(config.get("eos_token_id"))
    for key in ("bos_token_id", "pad_token_id"):
        token = tokenizer.named_tokens.get(key.removesuffix("_id"))
        named = tokenizer.token_id(token) if token is not None and key == "bos_token_id" else None
        declared = (config.get(key) if same else None, _generation(tokenizer).get(key), named)
        ids[key] = next((one for one in declared if type(one) is int and 0 <= one < tokenizer.vocab_size), None)
    return ids


def model_config(directory: Path | None) -> dict[str, Any]:
    """The config.json in a directory; empty if it does not exist."""
    try:
        return _object(regular(directory / "config.json").read_bytes()) if directory else {}
    except OSError:
        return {}


def _generation(tokenizer: TextTokenizer) -> dict[str, Any]:
    return _object(tokenizer.files.get(GENERATION, b"{}"))


def _object(content: bytes) -> dict[str, Any]:
    """The JSON object in a file; empty if the file holds anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _ids(given: Any) -> list[int]:
    return [one for one in (given if isinstance(given, list) else [given]) if type(one) is int]
