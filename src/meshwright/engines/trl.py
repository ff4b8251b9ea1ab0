"""Engine `trl`: Hugging Face's trl, supervised fine-tuning and direct preference optimization."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import Strategy
from meshwright.engines.hf_trainer import HfTrainer
from meshwright.engines.peft import ADAPTERS
from meshwright.engines.settings import RULES, Fate, Rule, only, said
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.run import ResolvedRun


def _finetune(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    adapters = isinstance(resolved.run.finetune, LoraSpec | Ia3Spec)
    return (ADAPTERS if adapters else RULES)["finetune"](value, resolved)


def _packing(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if resolved.run.training.preference is not None and value != "padded":
        return "refused", "trl reads one pair per row; set data.packing=padded"
    if value == "best_fit":
        return "refused", "the program for trl does not pack records; set data.packing=padded"
    return "said", ""


def _separate(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if not value or resolved.run.data.packing == "padded":
        return "said", ""
    return "refused", "the program for trl treats each sample of a stream as one document"


def _length(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    """A row includes the last target: one more token than the sequence."""
    most = resolved.model.max_positions
    if resolved.model.positions != "learned" or value < most:
        return "said", ""
    return "refused", f"trl's rows have one more token, and the model has {most} positions; set it to {most - 1}"


def _start(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if value is None or resolved.run.training.preference is None:
        return "said", ""
    return "refused", "trl's reference model would be the given adapters, not their base"


class TrlEngine(HfTrainer):
    """trl's `SFTTrainer`, with its own loss, and its `DPOTrainer` where the recipe learns from pairs of answers."""

    name = "trl"
    about = "trl"
    packages: ClassVar = {"transformers": "trl", "peft": "trl", "datasets": "trl", "trl": "trl"}
    oldest: ClassVar = {}  # it does not shard
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}
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
        "training.preference": said,
        "training.preference.reference": only("start", why="trl always uses a reference model; set it to start"),
    }

    def cannot_dump(self, resolved: ResolvedRun) -> str:
        """The proof's random tokens are not preference pairs."""
        if resolved.run.training.preference is None:
            return ""
        return "training.preference: verify trains on random tokens, not on preference pairs"

    def words(self, resolved: ResolvedRun, program: str) -> dict[str, Any]:
        """Also the preference's settings."""
        preference = resolved.run.training.preference
        more: dict[str, Any] = {"pairs": preference is not None}
        if preference is not None:
            more |= {"beta": preference.beta, "smoothing": preference.label_smoothing}
        return super().words(resolved, program) | more
