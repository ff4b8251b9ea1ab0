"""The YAML of Megatron-LM's functional tests, `model_config.yaml`: its flags as a mapping, beside the test's own keys.

Their runner (`tests/functional_tests/shell_test_utils/_run_training.sh`) writes `flag value` for every entry, the flag
alone for `true`, and the words inside brackets for a list.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.megatron import read_megatron
from meshwright.imports.megatron_combined import SWITCHES
from meshwright.imports.reading import Reading, Rule, nothing
from meshwright.spec.errors import UserError

FLAGS = "MODEL_ARGS"
TRAINS = "pretraining"
NO_PART = "it has no part in training"
RULES: Mapping[str, Rule] = {
    "ENV_VARS": nothing("set the variables of the processes where they are started"),
    "MODE": lambda reading, value, origin: None,  # `read_model_config` reads it
    "BASE_MODEL_ARGS": lambda reading, value, origin: None,  # others merge it
    "BEFORE_SCRIPT": nothing(f"no file is executed, and {NO_PART}"),
    "AFTER_SCRIPT": nothing(f"no file is executed, and {NO_PART}"),
    **dict.fromkeys(
        ("TEST_TYPE", "TEST_EVALUATION", "METRICS", "THROUGHPUT_TEST_PARAMS", "MODEL_ENV_VARS"), nothing(NO_PART)
    ),
    "LAUNCHER": nothing("Meshwright, torchrun or Slurm starts the processes (docs/clusters.md)"),
}


def is_model_config(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a test of Megatron-LM."""
    return FLAGS in values


def read_model_config(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read the flags of a test's first run.

    Raises `UserError` if it trains nothing, or gives keys of a NeMo recipe instead of flags.
    """
    mode = values.get("MODE") or TRAINS
    if mode != TRAINS:
        raise UserError(f"{file}: MODE={mode}: no training with Megatron-LM's flags; supported: {TRAINS}")
    given = values[FLAGS]
    if not isinstance(given, Mapping) or not given:
        raise UserError(f"{file}: {FLAGS}={given}: must be a mapping of flags, as in {{--num-layers: 12}}")
    if others := [key for key in given if not key.startswith("--")]:
        raise UserError(
            f"{file}: {FLAGS}: {others[0]} changes a NeMo recipe in Python, which is not read; supported are "
            "Megatron-LM's flags, as in --num-layers"
        )
    later = nothing(f"of a later run of the test; {FLAGS} is imported")
    rules = {**RULES, **{key: later for key in values if key.startswith(f"{FLAGS}_")}}
    reading.take({key: value for key, value in values.items() if key != FLAGS}, rules, file)
    flags = {key[2:]: _value(value) for key, value in given.items() if value is not None and value != ""}
    for flag in [flag for flag, value in flags.items() if value is False]:
        del flags[flag]
        reading.give_up(f"{file}: {flag}=False", "their runner writes `false` behind the flag; it is taken as absent")
    for flag in [flag for flag in flags.keys() & SWITCHES if flags[flag] is not True]:
        raise UserError(f"{file}: {flag}={flags[flag]}: the flag has no value; supported: true")
    read_megatron(reading, flags, file)


def _value(value: Any) -> Any:
    """A value as the shell passes it: a list's words, with or without quotes around its brackets."""
    if isinstance(value, list):
        return " ".join(str(word) for word in value)
    if isinstance(value, str) and value[:1] + value[-1:] == "[]":
        return value[1:-1].strip()
    if isinstance(value, Mapping):
        return str(value)
    return True if value == "true" else value
