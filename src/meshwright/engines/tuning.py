"""Engines of Hugging Face's fine-tuning: peft under the Trainer of transformers; trl, for records and preferences."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.loops import HfTrainer
from meshwright.engines.settings import RULES, Fate, Rule, expressed, only
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.run import ResolvedRun


def _adapters(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if isinstance(resolved.run.finetune, LoraSpec | Ia3Spec):
        return "expressed", ""
    return "refused", "peft trains adapters (finetune.method=lora or ia3); hf_trainer trains the whole model"


ADAPTERS: Mapping[str, Rule] = {
    "finetune": _adapters,
    "finetune.base": only("plain", reason="the program does not quantize frozen matrices; set finetune.base=plain"),
    "finetune.dropout": only(0.0, reason="engines draw different dropout masks; set finetune.dropout=0"),
    "finetune.b_lr_ratio": only(1.0, reason="the program supports only one learning rate; set finetune.b_lr_ratio=1"),
    "finetune.train": only((), reason="the program trains only adapters; leave finetune.train out"),
}
"""Rules of adapters."""


class PeftEngine(HfTrainer):
    """peft's adapters on transformers' model, started from ours, under the `Trainer`."""

    name = "peft"
    about = "peft under the Trainer of Hugging Face transformers"
    packages: ClassVar = {"transformers": "peft", "accelerate": "peft", "peft": "peft"}
    oldest: ClassVar = {}  # it does not shard
    strategies = ("ddp",)
    rules: ClassVar[Mapping[str, Rule]] = {**HfTrainer.rules, **ADAPTERS}


def _finetune(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    adapters = isinstance(resolved.run.finetune, LoraSpec | Ia3Spec)
    return (ADAPTERS if adapters else RULES)["finetune"](value, resolved)


def _packing(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if resolved.run.training.preference is not None and value != "padded":
        return "refused", "trl reads one pair per row; set data.packing=padded"
    if value == "best_fit":
        return "refused", "the program for trl does not pack records; set data.packing=padded"
    return "expressed", ""


def _separate(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if not value or resolved.run.data.packing == "padded":
        return "expressed", ""
    return "refused", "the program for trl treats each sample of a stream as one document"


def _length(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    """A row includes the last target: one more token than the sequence."""
    most = resolved.model.max_positions
    if resolved.model.positions != "learned" or value < most:
        return "expressed", ""
    return "refused", f"trl's rows have one more token, and the model has {most} positions; set it to {most - 1}"


def _start(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if value is None or resolved.run.training.preference is None:
        return "expressed", ""
    return "refused", "trl's reference model would be the given adapters, not their base"


class TrlEngine(HfTrainer):
    """trl's `SFTTrainer`, with its own loss, and its `DPOTrainer` where the recipe learns from pairs of answers."""

    name = "trl"
    about = "trl"
    packages: ClassVar = {"transformers": "trl", "peft": "trl", "datasets": "trl", "trl": "trl"}
    oldest: ClassVar = {}  # it does not shard
    strategies = ("ddp",)
    more_transformers = ", PreTrainedTokenizerFast, TrainerCallback"
    rules: ClassVar[Mapping[str, Rule]] = {
        **ADAPTERS,
        "finetune": _finetune,
        "finetune.train": lambda value, resolved: (
            _finetune(value, resolved) if not value else ADAPTERS["finetune.train"](value, resolved)
        ),
        "finetune.start_from": _start,
        "data.packing": _packing,
        "data.sequence_length": _length,
        "data.separate_documents": _separate,
        "training.preference": expressed,
        "training.preference.reference": only("start", reason="trl always uses a reference model; set it to start"),
    }

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; also Llama 4's text model, whose class names a part that it does not have."""
        refused, foreign = dict(super().cannot(resolved)), resolved.model.foreign
        if foreign is not None and json.loads(foreign.config).get("model_type") == "llama4_text":
            refused["model.name"] = "trl's loss needs the model without its head, which it does not find in Llama 4's"
        return refused

    def cannot_dump(self, resolved: ResolvedRun) -> str:
        """The proof's random tokens are not preference pairs."""
        if resolved.run.training.preference is None:
            return ""
        return "training.preference: verify trains on random tokens, not on preference pairs"
