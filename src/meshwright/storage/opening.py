"""Reading of untrusted configuration files: text within limits, and plain data that forms a tree. Nothing is run."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec.document import FAST_LOADER, READ_OTHERWISE
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.jsonl import distinct_keys

LARGEST_FILE = 2**18
"""Bytes; people write these files by hand."""
LARGEST_TREE = 20_000
"""Values of a file, those that YAML's aliases repeat counted each time."""
LARGEST_NUMBER = 10**300
DEEPEST = 32


def read_text(path: Path) -> str:
    """The text of a file. Raises `UserError` if it is not text, or too large for a configuration."""
    with regular(path).open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise UserError(f"{path}: is larger than {LARGEST_FILE} bytes, so it is not a configuration file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def read_data(path: Path, text: str) -> Any:
    """JSON, TOML or YAML as mappings, lists, texts and finite numbers. Raises `UserError` if it cannot be parsed, or
    refers to itself."""
    try:
        if path.suffix == ".json":
            data = json.loads(text, parse_constant=_refuse, object_pairs_hook=distinct_keys)
        else:
            data = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except RecursionError as error:
        raise UserError(f"{path}: cannot be read: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: cannot be read as YAML: {error.problem or error.context}") from error
    # Invalid values of YAML's own tags (!!int, !!bool, !!timestamp) raise whatever Python raises.
    except (ValueError, yaml.YAMLError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split()) or 'a value is malformed'}") from error
    return _plain(data, path, count(1))


def _yaml(text: str) -> Any:
    """What `yaml.safe_load` reads, by libyaml where it reads the same."""
    if not READ_OTHERWISE.search(text):
        try:
            return yaml.load(text, Loader=FAST_LOADER)  # a safe loader
        except Exception:  # again, for the message
            pass
    return yaml.safe_load(text)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _plain(value: Any, path: Path, values: Iterator[int], depth: int = 0) -> Any:
    """A parser's output, copied as plain data; `values` counts them. Raises `UserError` if it refers to itself."""
    if next(values) > LARGEST_TREE or depth > DEEPEST:
        raise UserError(f"{path}: has more than {LARGEST_TREE} values, or is nested too deeply")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, path, values, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner, path, values, depth + 1) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not isfinite(value) or abs(value) > LARGEST_NUMBER:
            raise UserError(f"{path}: contains a number that is not finite or is too large")
        return value
    if isinstance(value, str):
        return _number(value)
    return value if value is None or isinstance(value, bool) else str(value)


def _number(text: str) -> str | float:
    """YAML 1.1 leaves `1e-5` a text; numbers that are written so are numbers."""
    try:
        number = float(text) if "e" in text.lower() and text[:1] in "0123456789.-+" else None
    except ValueError:
        return text
    return text if number is None or not isfinite(number) else number
