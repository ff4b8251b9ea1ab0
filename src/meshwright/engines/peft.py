"""Engine `peft`: Hugging Face's peft under the Trainer of transformers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import Strategy
from meshwright.engines.hf_trainer import HfTrainer
from meshwright.engines.settings import Fate, Rule, only
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.run import ResolvedRun


def _adapters(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if isinstance(resolved.run.finetune, LoraSpec | Ia3Spec):
        return "said", ""
    return "refused", "peft trains adapters (finetune.method=lora or ia3); hf_trainer trains the whole model"


ADAPTERS: Mapping[str, Rule] = {
    "finetune": _adapters,
    "finetune.base": only("plain", why="the program does not quantize frozen matrices; set finetune.base=plain"),
    "finetune.dropout": only(0.0, why="engines draw different dropout masks; set finetune.dropout=0"),
    "finetune.b_lr_ratio": only(1.0, why="the program supports only one learning rate; set finetune.b_lr_ratio=1"),
    "finetune.train": only((), why="the program trains only adapters; leave finetune.train out"),
}
"""Rules of adapters."""


class PeftEngine(HfTrainer):
    """peft's adapters on transformers' model, started from ours, under the `Trainer`."""

    name = "peft"
    about = "peft under the Trainer of Hugging Face transformers"
    packages: ClassVar = {"transformers": "peft", "accelerate": "peft", "peft": "peft"}
    oldest: ClassVar = {}  # it does not shard
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}
    rules: ClassVar[Mapping[str, Rule]] = {**HfTrainer.rules, **ADAPTERS}
