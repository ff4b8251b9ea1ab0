"""Engine `hf_trainer`: the Trainer of Hugging Face transformers."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.engines.settings import Rule, said


class HfTrainer(TemplateEngine):
    """transformers' `Trainer`; sharding is transformers' own (`DistributedConfig`), because on a CPU `fsdp=` is
    silently ignored."""

    name = "hf_trainer"
    about = "the Trainer of Hugging Face transformers"
    packages: ClassVar = {"transformers": "compare", "accelerate": "compare"}
    oldest: ClassVar = {"transformers": "5.23"}  # before July 2026 DistributedConfig had no sizes of axes
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero3", "hybrid"), "")
    more_transformers = ", Trainer, TrainerCallback, TrainingArguments"
    rules: ClassVar[Mapping[str, Rule]] = {"data.packing": said, "data.separate_documents": said}
