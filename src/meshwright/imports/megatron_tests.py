"""Megatron-LM's functional tests, whose YAML holds the flags of their runs."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import NoEffect
from meshwright.imports.megatron import read_megatron
from meshwright.imports.megatron_combined import SWITCHES
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import only, without
from meshwright.spec.errors import UserError

MODEL_ARGS = "MODEL_ARGS"
TRAINS = "pretraining"
TEST_RULES: Mapping[str, Rule] = {
    "ENV_VARS": without("set the variables of the processes where they are started"),
    "MODEL_ENV_VARS": without("set the variables of the processes where they are started"),
    "MODE": only(TRAINS, "a recipe always trains"),
    "BASE_MODEL_ARGS": NoEffect.UNREAD,  # others merge it
    "BEFORE_SCRIPT": without("no file is executed"),
    "AFTER_SCRIPT": without("no file is executed"),
    **dict.fromkeys(("TEST_TYPE", "TEST_EVALUATION", "METRICS", "THROUGHPUT_TEST_PARAMS"), NoEffect.GUARDS),
    "LAUNCHER": NoEffect.LAUNCH,
}


def is_model_config(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a test of Megatron-LM."""
    return MODEL_ARGS in values


def read_model_config(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read the flags of a test's first run.

    Raises `UserError` if it trains nothing, or gives keys of a NeMo recipe instead of flags.
    """
    mode = values.get("MODE") or TRAINS
    if mode != TRAINS:
        raise UserError(f"{file}: MODE={mode}: no training with Megatron-LM's flags; supported: {TRAINS}")
    given = values[MODEL_ARGS]
    if not isinstance(given, Mapping) or not given:
        raise UserError(f"{file}: {MODEL_ARGS}={given}: must be a mapping of flags, as in {{--num-layers: 12}}")
    if others := [key for key in given if not key.startswith("--")]:
        raise UserError(
            f"{file}: {MODEL_ARGS}: {others[0]} changes a NeMo recipe in Python, which is not read; supported are "
            "Megatron-LM's flags, as in --num-layers"
        )
    later = without(f"of a later run of the test; {MODEL_ARGS} is imported")
    rules = {**TEST_RULES, **{key: later for key in values if key.startswith(f"{MODEL_ARGS}_")}}
    reading.take({key: value for key, value in values.items() if key != MODEL_ARGS}, rules, file)
    flags = {key[2:]: _as_passed(value) for key, value in given.items() if value is not None and value != ""}
    for flag in [flag for flag, value in flags.items() if value is False]:
        del flags[flag]
        reading.drop(f"{file}: {flag}=False", "their runner writes `false` behind the flag; it is taken as absent")
    for flag in [flag for flag in flags.keys() & SWITCHES if flags[flag] is not True]:
        raise UserError(f"{file}: {flag}={flags[flag]}: the flag has no value; supported: true")
    read_megatron(reading, flags, file)


def _as_passed(value: Any) -> Any:
    """A value as the shell passes it: a list's words, with or without quotes around its brackets."""
    if isinstance(value, list):
        return " ".join(str(word) for word in value)
    if isinstance(value, str) and value[:1] + value[-1:] == "[]":
        return value[1:-1].strip()
    if isinstance(value, Mapping):
        return str(value)
    return True if value == "true" else value
