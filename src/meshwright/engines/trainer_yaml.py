"""Exports as the YAML of axolotl and of LLaMA-Factory, which drive the Trainer of Hugging Face transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.megatron_lm import LATER
from meshwright.engines.written import YamlEngine, stated, whole
from meshwright.imports.axolotl_data import FORMATS, VERBATIM
from meshwright.imports.hf_arguments import OPTIMIZERS as READ
from meshwright.imports.llama_factory import RECORDS, TABLE, TEMPLATES
from meshwright.imports.names import Names, lora
from meshwright.spec.finetune import FullSpec, LoraSpec
from meshwright.spec.precision import BF16, FP16, FP32
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import TrainingSpec

OPTIMIZERS = Names(
    "training.optimizer.name",
    {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"},
)
assert all(READ[theirs] == ours for ours, theirs in OPTIMIZERS.written.items())
SCHEDULES = Names(
    "training.lr_schedule.name", {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
)
PRECISIONS = Names(
    "training.precision",
    {kind: {BF16.name: kind == BF16.name, FP16.name: kind == FP16.name} for kind in (BF16.name, FP16.name, FP32.name)},
)
TYPES = Names(
    "data.sources.format",
    {
        "auto": None,
        **{ours: theirs for theirs, ours in FORMATS.items() if theirs != "sharegpt"},
        "prompt_completion": {"field_instruction": "prompt", "field_output": "completion", **VERBATIM},
    },
)
DESCRIBED = Names("data.sources.format", RECORDS)
SHARDED = {
    "fsdp_version": 2,
    "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
}
TEMPLATE = {ours: theirs for theirs, ours in TEMPLATES.items()}
"""By our name of a chat template; one of another name comes back as auto."""
BITS = Names("finetune.base", {"plain": None, "nf4": 4, "int8": 8}, counts=lora)
BASES = Names(
    "finetune.base",
    {
        "plain": {"adapter": "lora"},
        "nf4": {"adapter": "qlora", "load_in_4bit": True},
        "int8": {"adapter": "lora", "load_in_8bit": True},
    },
    counts=lora,
)
"""axolotl's keys."""
TRAINED = Names(
    "data.chat.train_on", {"assistant": {}, "all": {"train_on_prompt": True}, "last": {"mask_history": True}}
)
ORDERS = Names("data.order", {"shuffled": {}, "given": {"disable_shuffling": True}})
PACKED = Names("data.packing", {"best_fit": True, "padded": False})


def _optimization(training: TrainingSpec) -> dict[str, Any]:
    """The settings of optimizer and clipping that both name as the Trainer does."""
    optimizer = training.optimizer
    return {
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": training.clip or 0.0,
    }


class AxolotlConfig(YamlEngine):
    """axolotl's YAML."""

    name = "axolotl"
    about = "axolotl"
    file = "axolotl.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, BASES, PACKED)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Other optimizers, and models that are no directory."""
        run, found = resolved.run, dict[str, str]()
        if bad := [source for source in run.data.sources if source.format not in TYPES.written]:
            found["data.sources"] = f"set the format of {bad[0].path}: {', '.join(TYPES.written)}"
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

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under axolotl's names."""
        run, training, data = resolved.run, resolved.run.training, resolved.run.data
        schedule = training.lr_schedule
        return {
            "base_model": run.model.name,
            "datasets": [_axolotl_dataset(source) for source in data.sources],
            "chat_template": data.chat.template if data.chat.template != "auto" else None,
            "val_set_size": data.held_out,
            "sequence_len": data.sequence_length,
            "sample_packing": PACKED.write(data.packing),
            **_axolotl_adapter(resolved),
            "micro_batch_size": resolved.micro_batch,
            "gradient_accumulation_steps": resolved.accumulation,
            "max_steps": training.steps,
            "optimizer": _axolotl_optimizer(resolved),
            **_optimization(training),
            "cosine_min_lr_ratio": schedule.final if schedule.name == "cosine" and schedule.final else None,
            "lr_scheduler": SCHEDULES.write(schedule.name),
            "warmup_steps": schedule.warmup_steps(training.steps),
            **PRECISIONS.write(training.precision),
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


def _axolotl_optimizer(resolved: ResolvedRun) -> str:
    """axolotl refuses bitsandbytes' 8-bit AdamW under FSDP2, and names torchao's."""
    name = resolved.run.training.optimizer.name
    if name == "adamw_8bit" and resolved.run.layout.zero_stage:
        return "adamw_torch_8bit"
    return OPTIMIZERS.write(name)


def _axolotl_dataset(source: Any) -> dict[str, Any]:
    remote = source.path.startswith("hub:")
    found = {"path": source.path.removeprefix("hub:"), "type": TYPES.write(source.format)}
    found |= {} if remote else {"ds_type": "json"}
    return stated(found | {"split": source.split if source.split != "train" else None, "name": source.subset})


def _axolotl_adapter(resolved: ResolvedRun) -> dict[str, Any]:
    finetune = resolved.run.finetune
    if not isinstance(finetune, LoraSpec):
        return {}
    linear = finetune.targets == "all-linear"
    return {
        **BASES.write(finetune.base),
        "lora_r": finetune.rank,
        "lora_alpha": whole(finetune.alpha),
        "lora_dropout": finetune.dropout,
        "lora_target_linear": True if linear else None,
        "lora_target_modules": None if linear else list(finetune.targets),
        "lora_modules_to_save": list(finetune.train) or None,
        "peft_use_dora": finetune.dora or None,
        "peft_use_rslora": finetune.rslora or None,
    }


class LlamaFactoryConfig(YamlEngine):
    """LLaMA-Factory's YAML."""

    name = "llama_factory"
    about = "LLaMA-Factory"
    file = "llama_factory.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, BITS, TRAINED, ORDERS)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models without a directory, other optimizers, schedules and data."""
        run, found = resolved.run, dict[str, str]()
        schedule = run.training.lr_schedule
        if not (run.model.name or "").startswith((".", "/")):
            found["model.name"] = "LLaMA-Factory loads a Hugging Face directory; write its path, starting with ./ or /"
        if schedule.name != "constant" and schedule.final:
            found["training.lr_schedule.final"] = "this export's schedules decay to 0; set it to 0"
        if run.layout.zero_stage:
            found["layout.zero"] = (
                "LLaMA-Factory's YAML does not describe sharding; set layout.zero=0, and give LLaMA-Factory a "
                "DeepSpeed JSON"
            )
        if bad := [source.path for source in run.data.sources if source.format not in RECORDS]:
            found["data.sources"] = f"set the format of {bad[0]}: {', '.join(RECORDS)}"
        return found

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, and where it looks for data."""
        return (
            LATER,
            (f"put {TABLE}, which describes the data, into the recipe's folder, and start LLaMA-Factory there"),
        )

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """The table of data sets."""
        table = {name: _entry(source) for name, source in _named(resolved).items()}
        return {TABLE: json.dumps(table, indent=2) + "\n"}

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under LLaMA-Factory's names."""
        run, training, data = resolved.run, resolved.run.training, resolved.run.data
        schedule, preference = training.lr_schedule, training.preference
        texts = all(source.format == "text" for source in data.sources)
        packed = data.packing == "concatenated" or (PACKED.write(data.packing) and not texts)
        return {
            "model_name_or_path": run.model.name,
            "train_from_scratch": True if run.model.weights == "random" else None,
            "stage": "dpo" if preference else "pt" if texts else "sft",
            "do_train": True,
            **_method(resolved),
            "pref_beta": preference.beta if preference else None,
            "dpo_label_smoothing": preference.label_smoothing if preference else None,
            "dataset": ",".join(_named(resolved)),
            "dataset_dir": ".",
            "template": TEMPLATE.get(data.chat.template),
            "cutoff_len": data.sequence_length,
            "packing": packed,
            "neat_packing": True if packed and data.separate_documents and not texts else None,
            "val_size": data.held_out,
            **TRAINED.write(data.chat.train_on),
            **ORDERS.write(data.order),
            "per_device_train_batch_size": resolved.micro_batch,
            "gradient_accumulation_steps": resolved.accumulation,
            "max_steps": training.steps,
            "optim": OPTIMIZERS.write(training.optimizer.name),
            **_optimization(training),
            "lr_scheduler_type": SCHEDULES.write(schedule.name),
            "warmup_steps": schedule.warmup_steps(training.steps),
            **PRECISIONS.write(training.precision),
            "disable_gradient_checkpointing": set(resolved.recompute) != {"full"},
            "torch_compile": training.compile or None,
            "full_determinism": training.deterministic or None,
            "seed": training.seed,
            "save_steps": run.checkpoint.every or training.steps,
            "save_total_limit": run.checkpoint.keep_last,
            "logging_steps": 1,
            "output_dir": run.run_dir,
            "report_to": list(run.trackers) or "none",
        }


def _named(resolved: ResolvedRun) -> dict[str, Any]:
    """The sources by names; two of one name get numbers."""
    found: dict[str, Any] = {}
    for number, source in enumerate(resolved.run.data.sources):
        stem = Path(source.path.removeprefix("hub:")).name.partition(".")[0]
        found[stem if stem not in found else f"{stem}_{number}"] = source
    return found


def _entry(source: Any) -> dict[str, Any]:
    remote = source.path.startswith("hub:")
    place = {"hf_hub_url": source.path.removeprefix("hub:")} if remote else {"file_name": source.path}
    more = {"split": source.split if source.split != "train" else None, "subset": source.subset}
    form = dict(DESCRIBED.write(source.format))
    if source.format == "text":
        form["columns"] = {"prompt": source.text_key}
    return {**place, **form, **stated(more)}


def _method(resolved: ResolvedRun) -> dict[str, Any]:
    finetune = resolved.run.finetune
    if not isinstance(finetune, LoraSpec):
        last = finetune.last_layers if isinstance(finetune, FullSpec) else None
        return {"finetuning_type": "freeze", "freeze_trainable_layers": last} if last else {"finetuning_type": "full"}
    every = finetune.targets == "all-linear"
    return {
        "finetuning_type": "lora",
        "adapter_name_or_path": finetune.start_from,
        "lora_rank": finetune.rank,
        "lora_alpha": whole(finetune.alpha),
        "lora_dropout": finetune.dropout,
        "lora_target": "all" if every else ",".join(finetune.targets),
        "additional_target": ",".join(finetune.train) or None,
        "use_dora": finetune.dora or None,
        "use_rslora": finetune.rslora or None,
        "loraplus_lr_ratio": finetune.b_lr_ratio if finetune.b_lr_ratio != 1 else None,
        "quantization_bit": BITS.write(finetune.base),
        "double_quantization": finetune.double_quantization if finetune.base == "nf4" else None,
    }
