"""The systems whose files are imported: how a file of each is recognised, what reads it, and the rules of its keys."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.imports import (
    accelerate_yaml,
    automodel,
    axolotl,
    deepspeed,
    foundry,
    hf_arguments,
    hf_script,
    llama_factory,
    llama_factory_v1,
    megatron,
    megatron_tests,
    nanogpt,
    nanotron,
    nemo,
    torchtitan,
)
from meshwright.imports.program import is_program, read_program
from meshwright.imports.reading import Reading, Rule, flat, of_section, refusing
from meshwright.imports.titan_python import is_titan_python
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.spec.text import command
from meshwright.storage.opening import read_data, read_text

FORMATS = (
    "a DeepSpeed JSON, transformers' TrainingArguments (YAML, JSON or a script's flags), an Accelerate, axolotl, "
    "LLaMA-Factory, LLM-Foundry, Nanotron, NeMo AutoModel, NeMo or Megatron-Bridge YAML, a torchtitan configuration "
    "(.py, .toml, or the JSON that it prints), a nanoGPT configuration (.py), a script with Megatron-LM's flags or its "
    "tests' YAML (MODEL_ARGS), or a program from `meshwright export`"
)
MOST_UNKNOWN = 1 / 3
"""Share of a file's keys that may be unknown to the system whose file it seems to be."""
EXAMPLES = 3
"""Unknown keys that an error names."""

Reader = Callable[[Reading, Any, str], None]
"""Reads (reading, a file's content, its name)."""


@dataclass(frozen=True)
class System:
    """A system's files of one kind."""

    name: str
    read: Reader
    recognises: Callable[[Mapping[str, Any]], bool] = lambda values: False
    """Whether a mapping has this system's keys; files that are no mappings are recognised by their text."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """The rules of its keys, by dotted names; none where a file holds no keys of a fixed set."""

    def share(self, keys: Sequence[str]) -> float:
        """The share of keys that the system knows."""
        known = [key for key in keys if key in self.rules or of_section(self.rules, key)]
        return len(known) / max(1, len(keys))


FLAGS = System("Megatron-LM", megatron.read_script, rules=megatron.RULES)
ARGUMENT_FLAGS = System("transformers' TrainingArguments", hf_script.read_hf_script, rules=hf_script.ALL)
NANOGPT = System("nanoGPT", nanogpt.read_nanogpt, rules=nanogpt.RULES)
TITAN = System("torchtitan", torchtitan.read_torchtitan, torchtitan.is_torchtitan, torchtitan.RULES)
DEEPSPEED = System("DeepSpeed", deepspeed.read_deepspeed, deepspeed.is_deepspeed, deepspeed.RULES)
SYSTEMS = (
    System("Megatron-LM's tests", megatron_tests.read_model_config, megatron_tests.is_model_config),
    System("Accelerate", accelerate_yaml.read_accelerate, accelerate_yaml.is_accelerate, accelerate_yaml.RULES),
    System("axolotl", axolotl.read_axolotl, axolotl.is_axolotl, axolotl.RULES),
    System("LLaMA-Factory", llama_factory.read_llama_factory, llama_factory.is_llama_factory, llama_factory.RULES),
    System(
        "LLaMA-Factory v1",
        llama_factory_v1.read_llama_factory_v1,
        llama_factory_v1.is_llama_factory_v1,
        llama_factory_v1.RULES,
    ),
    System("LLaMA-Factory's data", llama_factory_v1.read_v1_table, llama_factory_v1.is_v1_table),
    System("LLaMA-Factory's data", llama_factory.read_dataset_info, llama_factory.is_dataset_info),
    System("LLM-Foundry", foundry.read_foundry, foundry.is_foundry, foundry.RULES),
    System("Nanotron", nanotron.read_nanotron, nanotron.is_nanotron, nanotron.RULES),
    System("NeMo AutoModel", automodel.read_automodel, automodel.is_automodel, automodel.RULES),
    TITAN,
    System("Megatron-Bridge or NeMo", nemo.read_nemo, nemo.is_nemo, nemo.RULES),
    System("transformers' TrainingArguments", hf_arguments.read_hf_arguments, hf_arguments.is_hf_arguments,
           hf_arguments.ALL_RULES),
    DEEPSPEED,
)  # fmt: skip
"""The first that recognises a file reads it."""


IN_CODE = {
    "Lightning": re.compile(r"^\s*(?:from|import)\s+(?:lightning|pytorch_lightning|lightning_fabric)\b", re.MULTILINE),
    "Composer": re.compile(r"^\s*(?:from|import)\s+composer\b", re.MULTILINE),
    "the Hugging Face Trainer or Accelerate": re.compile(
        r"^\s*(?:from|import)\s+(?:transformers|accelerate|trl)\b", re.MULTILINE
    ),
    "DeepSpeed": re.compile(r"^\s*(?:from|import)\s+deepspeed\b", re.MULTILINE),
    "Alpa": re.compile(r"^\s*(?:from|import)\s+alpa\b", re.MULTILINE),
}
"""System -> the imports of a program that is configured in code."""


def describe_foreign(path: Path) -> str:
    """What to do with a file that is another system's and no recipe, which has sections of a recipe alone; empty if it
    is no known system's."""
    try:
        values = read_data(path, read_text(path)) if path.suffix in (".yaml", ".yml", ".json") else {"": path}
        if isinstance(values, Mapping) and values.keys() <= Run.model_fields.keys():
            return ""
        if path.suffix == ".py" and (name := _configured_in_code(read_text(path))):
            how = command("import", path)
            return f"{path}: not a recipe, but a program of {name}; see what can be done: {how}"
        return (
            f"{path}: not a recipe, but a file of {_opened(path)[0].name}; convert it first: "
            f"{command('import', path, '--write', 'run.yaml')}"
        )
    except (UserError, OSError):
        return ""


def read_files(reading: Reading, paths: Sequence[Path]) -> None:
    """Read all files, DeepSpeed's first, because its settings win.

    Raises `UserError` for a file of no known system, and for one of which its system knows too few keys.
    """
    opened = sorted((_opened(path) for path in paths), key=lambda file: file[0] is not DEEPSPEED)
    for system, content, name in opened:
        seen, unknown = len(reading.seen), len(reading.unknown)
        with refusing(f"{name}: cannot be read: a value is of a kind that its key never has"):
            system.read(reading, content, name)
        if system.rules:
            _check_known(system, reading.seen[seen:], reading.unknown[unknown:], name)


def _opened(path: Path) -> tuple[System, Any, str]:
    """The system of a file, the file's content, and its name."""
    text, name = read_text(path), path.name
    if path.suffix == ".py" and is_program(text):
        return System("Meshwright", lambda reading, content, _: read_program(reading, content, path)), text, name
    if path.suffix == ".py" and is_titan_python(text):
        read = partial(torchtitan.read_torchtitan_python, package=path.resolve().parent.name)
        return System(TITAN.name, read, rules=TITAN.rules), text, name
    if path.suffix == ".py" and (name_in_code := _configured_in_code(text)):
        raise UserError(
            f"{path}: a program of {name_in_code}, which is configured in code, and no code is run; start with "
            "meshwright init, and set its strategy and devices as docs/importing.md lists them; JSON and YAML files "
            "beside the program can be imported"
        )
    if path.suffix == ".py":
        return NANOGPT, nanogpt.read_assignments(text, name), name
    if path.suffix not in (".json", ".yaml", ".yml", ".toml") and megatron.is_flags(text):
        return FLAGS, text, name
    if path.suffix not in (".json", ".yaml", ".yml", ".toml") and hf_script.is_hf_script(text):
        return ARGUMENT_FLAGS, text, name
    if path.suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        what = "has neither Megatron-LM's flags (--num-layers, ...) nor TrainingArguments (--learning_rate, ...)"
        raise UserError(f"{path}: {what}; supported are {FORMATS}")
    values = read_data(path, text)
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: unknown format; supported are {FORMATS}")
    for system in SYSTEMS:
        if system.recognises(values):
            return system, values, name
    if values and values.keys() <= Run.model_fields.keys():
        raise UserError(f"{path}: a recipe already; check it: {command('check', path)}")
    nearest = _nearest(list(flat(values)))
    likely = nearest.share(list(flat(values))) > 1 / 2
    hint = f", but most of its keys are {nearest.name}'s: import a whole file of it" if likely else ""
    raise UserError(f"{path}: unknown format{hint}; supported are {FORMATS}")


def _configured_in_code(text: str) -> str | None:
    """The system that a program imports, if it configures its training in code."""
    return next((name for name, pattern in IN_CODE.items() if pattern.search(text)), None)


def _check_known(system: System, seen: Sequence[str], unknown: Sequence[str], file: str) -> None:
    """Raise `UserError` if too many keys are unknown: the defaults of a system would replace what they mean."""
    if len(unknown) <= MOST_UNKNOWN * len(seen):
        return
    keys = [_key(origin, file) for origin in seen]
    nearest = _nearest(keys)
    named = ", ".join(_key(origin, file) for origin in unknown[:EXAMPLES])
    raise UserError(
        f"{file}: of its {len(seen)} keys, {len(unknown)} are unknown to {system.name}, whose file it seems to be "
        f"({named}, ...); "
        + (f"more of them are {nearest.name}'s, but it is no whole file of it; " if nearest.name != system.name else "")
        + "remove what is of another program or of another kind of training, and import the rest"
    )


def _nearest(keys: Sequence[str]) -> System:
    """The system that knows most of the keys."""
    return max(SYSTEMS, key=lambda system: system.share(keys))


def _key(origin: str, file: str) -> str:
    return origin.removeprefix(f"{file}: ").partition("=")[0]
