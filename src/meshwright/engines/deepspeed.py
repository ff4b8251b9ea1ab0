"""Engine `deepspeed`: a loop of DeepSpeed, with its ds_config.json."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine, strategy_of
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun

STAGES: Mapping[Strategy, int] = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


class DeepSpeedEngine(TemplateEngine):
    """DeepSpeed's engine under ZeRO 0 to 3, with every setting explicit: by default it clips gradients at 1.0."""

    name = "deepspeed"
    about = "a loop of DeepSpeed"
    packages: ClassVar = {"transformers": "deepspeed", "deepspeed": "deepspeed"}
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), "")
    numel = 'getattr(parameter, "ds_numel", parameter.numel())'

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`, and bf16 without ZeRO, where gradients accumulate only in bf16."""
        found, training = dict(super().cannot(resolved)), resolved.run.training
        whole = strategy_of(resolved.run.layout) in ("single", "ddp")
        if whole and training.precision == BF16.name and training.reduce_dtype == FP32.name:
            found["training.precision"] = (
                "without ZeRO DeepSpeed accumulates gradients of bf16 in bf16; use layout.zero"
            )
        return found

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """DeepSpeed's configuration."""
        return {"ds_config.json": json.dumps(ds_config(resolved), indent=2) + "\n"}


def ds_config(resolved: ResolvedRun) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    training = resolved.run.training
    mixed = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": training.reduce_dtype},
        "communication_data_type": training.reduce_dtype,
    }
    return {
        **(mixed if training.precision == BF16.name else {}),
        "train_batch_size": resolved.global_batch,
        "train_micro_batch_size_per_gpu": resolved.micro_batch,
        "gradient_accumulation_steps": resolved.accumulation,
        "gradient_clipping": training.clip or 0.0,
        "zero_optimization": {"stage": STAGES[strategy_of(resolved.run.layout)]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
