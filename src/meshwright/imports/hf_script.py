"""Scripts that start the Trainer with TrainingArguments as flags: FastChat's, Alpaca's, transformers' examples."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.imports.hf_arguments import ALL_RULES, read_hf_arguments
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import fact, without
from meshwright.imports.shell import take_flags

WORDS = {"true": True, "false": False}
LAUNCHER = re.compile(r"--(?:master_(?:port|addr)|node_rank|rdzv_\w+)(?:[= ]\S+)?")
"""Flags of torchrun that say where ranks meet."""


def _records(reading: Reading, value: Any, origin: str) -> None:
    reading.set("data.sources", [str(value)], origin)


RULES: Mapping[str, Rule] = {
    "nproc_per_node": fact("ranks of a node"),
    "nnodes": fact("nodes"),
    "model_max_length": "data.sequence_length",
    "data_path": _records,
    "train_file": _records,
    "eval_data_path": without("evaluation data is a fraction of the training data; set data.held_out"),
    "block_size": "data.sequence_length",
    "lazy_preprocess": without("records are encoded once, before training, and kept in a cache"),
}
"""What such programs have beside TrainingArguments."""
ALL: Mapping[str, Rule] = {**ALL_RULES, **RULES}


def is_hf_script(text: str) -> bool:
    """Whether a script gives TrainingArguments as flags."""
    return bool(re.search(r"--per_device_train_batch_size(?![\w-])", text))


def read_hf_script(reading: Reading, text: str, file: str) -> None:
    """Read the flags of a script."""
    flags = take_flags(reading, LAUNCHER.sub("", text), file)
    values = {name.replace("-", "_"): WORDS.get(str(value).lower(), value) for name, value in flags.items()}
    own = {name: value for name, value in values.items() if name in RULES}
    reading.take(own, RULES, file)
    read_hf_arguments(reading, {name: value for name, value in values.items() if name not in own}, file)
    reading.count_nodes()
