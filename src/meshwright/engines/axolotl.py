"""Export as an axolotl configuration: every setting that axolotl's YAML says, read back by our own importer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.engines.megatron_lm import LATER
from meshwright.engines.written import WrittenEngine
from meshwright.imports.axolotl_data import FORMATS, VERBATIM
from meshwright.spec.document import write_yaml
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.precision import BF16, FP16
from meshwright.spec.run import ResolvedRun

TYPES: Mapping[str, Any] = {
    **{ours: theirs for theirs, ours in FORMATS.items() if theirs != "sharegpt"},
    "prompt_completion": {"field_instruction": "prompt", "field_output": "completion", **VERBATIM},
}
OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}

SHARDED = {
    "fsdp_version": 2,
    "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
}


class AxolotlConfig(WrittenEngine):
    """axolotl's YAML."""

    name = "axolotl"
    about = "axolotl"
    file = "axolotl.yaml"

    def text(self, resolved: ResolvedRun) -> str:
        """The configuration."""
        return write_yaml(axolotl_config(resolved))

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Other optimizers, and models that are no directory."""
        run, found = resolved.run, dict[str, str]()
        if run.training.optimizer.name not in OPTIMIZERS:
            found["training.optimizer.name"] = f"this export supports {', '.join(OPTIMIZERS)}"
        if run.training.lr_schedule.warmup_steps(run.training.steps) == 1:
            found["training.lr_schedule.warmup"] = "axolotl turns a warm-up of 1 step into 2; set 0 or 2"
        if run.model.weights == "random":
            found["model.weights"] = "axolotl starts from the weights in the model's directory, not from random ones"
        if not (run.model.name or "").startswith((".", "/")):
            found["model.name"] = "axolotl loads a Hugging Face directory; write its path, starting with ./ or /"
        return found

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates."""
        return (LATER,)


def axolotl_config(resolved: ResolvedRun) -> dict[str, Any]:
    """The recipe under axolotl's names; every constant is explicit, because defaults differ."""
    run, training, data = resolved.run, resolved.run.training, resolved.run.data
    optimizer, schedule = training.optimizer, training.lr_schedule
    found: dict[str, Any] = {
        "base_model": run.model.name,
        "datasets": [_dataset(source) for source in data.sources],
        "chat_template": data.chat.template if data.chat.template != "auto" else None,
        "val_set_size": data.held_out,
        "sequence_len": data.sequence_length,
        "sample_packing": data.packing == "best_fit",
        **_adapter(resolved),
        "micro_batch_size": resolved.micro_batch,
        "gradient_accumulation_steps": resolved.accumulation,
        "max_steps": training.steps,
        "optimizer": _optimizer(resolved),
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": training.clip or 0.0,
        "cosine_min_lr_ratio": schedule.final if schedule.name == "cosine" and schedule.final else None,
        "lr_scheduler": SCHEDULES.get(schedule.name, schedule.name),
        "warmup_steps": schedule.warmup_steps(training.steps),
        BF16.name: training.precision == BF16.name,
        FP16.name: training.precision == FP16.name,
        "gradient_checkpointing": set(resolved.recompute) == {"full"},
        "torch_compile": training.compile or None,
        "seed": training.seed,
        "save_steps": run.checkpoint.every,
        "save_total_limit": run.checkpoint.keep_last,
        "eval_steps": training.evaluation.every,
        "wandb_project": Path(run.run_dir).name if "wandb" in run.trackers else None,
        **(SHARDED if run.layout.zero_stage == 3 else {}),
        "output_dir": run.run_dir,
    }
    return {key: value for key, value in found.items() if value is not None}


def _optimizer(resolved: ResolvedRun) -> str:
    """axolotl refuses bitsandbytes' 8-bit AdamW under FSDP2, and names torchao's."""
    name = resolved.run.training.optimizer.name
    if name == "adamw_8bit" and resolved.run.layout.zero_stage:
        return "adamw_torch_8bit"
    return OPTIMIZERS.get(name, name)


def _dataset(source: Any) -> dict[str, Any]:
    remote = source.path.startswith("hub:")
    found = {"path": source.path.removeprefix("hub:"), "type": TYPES.get(source.format)}
    found |= {} if remote else {"ds_type": "json"}
    found |= {"split": source.split if source.split != "train" else None, "name": source.subset}
    return {key: value for key, value in found.items() if value is not None}


def _adapter(resolved: ResolvedRun) -> dict[str, Any]:
    finetune = resolved.run.finetune
    if not isinstance(finetune, LoraSpec):
        return {}
    linear = finetune.targets == "all-linear"
    return {
        "adapter": "qlora" if finetune.base == "nf4" else "lora",
        "load_in_4bit": True if finetune.base == "nf4" else None,
        "load_in_8bit": True if finetune.base == "int8" else None,
        "lora_r": finetune.rank,
        "lora_alpha": int(finetune.alpha) if finetune.alpha == int(finetune.alpha) else finetune.alpha,
        "lora_dropout": finetune.dropout,
        "lora_target_linear": True if linear else None,
        "lora_target_modules": None if linear else list(finetune.targets),
        "lora_modules_to_save": list(finetune.train) or None,
        "peft_use_dora": finetune.dora or None,
        "peft_use_rslora": finetune.rslora or None,
    }
