"""Exports as the YAML of axolotl and of LLaMA-Factory, which drive the Trainer of Hugging Face transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.megatron_lm import LATER, PRECISIONS
from meshwright.engines.written import YamlEngine, fully, is_remote, named_data, refused_model, stated, unless, written
from meshwright.imports.axolotl import RULES as AXOLOTL_RULES
from meshwright.imports.axolotl_data import FORMATS, TEMPLATES, VERBATIM
from meshwright.imports.hf_arguments import RULES as HF_RULES
from meshwright.imports.llama_factory import RECORDS, TABLE
from meshwright.imports.llama_factory import RULES as FACTORY_RULES
from meshwright.imports.names import Names, lora
from meshwright.spec.finetune import FullSpec, LoraSpec
from meshwright.spec.run import ResolvedRun

OPTIMIZERS = Names.same("training.optimizer.name", "adamw", "adamw_8bit", "paged_adamw")
SCHEDULES = Names(
    "training.lr_schedule.name", {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
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
TRAINED = Names.same("data.chat.train_on", "assistant", "all", "last")
ORDERS = Names.same("data.order", "shuffled", "given")
PACKED = Names("data.packing", {"best_fit": True, "padded": False})


TRAINER = (
    "gradient_accumulation_steps max_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
    "warmup_steps bf16 fp16 seed save_total_limit output_dir"
)
"""Keys that both name as the Trainer does."""


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that switch something on."""
    return {key: value for key, value in values.items() if value}


AXOLOTL = "base_model sequence_len micro_batch_size optimizer lora_r lora_alpha lora_dropout"
AXOLOTL_GIVEN = "lora_target_linear lora_modules_to_save peft_use_dora peft_use_rslora torch_compile"
FACTORY = (
    "model_name_or_path cutoff_len per_device_train_batch_size optim pref_beta dpo_label_smoothing lora_rank "
    "lora_alpha lora_dropout"
)
FACTORY_GIVEN = (
    "train_from_scratch train_on_prompt mask_history disable_shuffling use_dora use_rslora torch_compile "
    "full_determinism"
)
"""Keys that are written only where they are true."""


class AxolotlConfig(YamlEngine):
    """axolotl's YAML."""

    name = "axolotl"
    about = "axolotl"
    file = "axolotl.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, BASES, PACKED)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Other optimizers, and models that are no directory."""
        run, refusals = resolved.run, dict[str, str]()
        if bad := [source for source in run.data.sources if source.format not in TYPES.written]:
            refusals["data.sources"] = f"set the format of {bad[0].path}: {', '.join(TYPES.written)}"
        if run.training.lr_schedule.warmup_steps(run.training.steps) == 1:
            refusals["training.lr_schedule.warmup"] = "axolotl turns a warm-up of 1 step into 2; set 0 or 2"
        if run.model.weights == "random":
            refusals["model.weights"] = "axolotl starts from the weights in the model's directory, not from random ones"
        return refusals | refused_model(resolved, "axolotl")

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates."""
        return (LATER,)

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under axolotl's names."""
        run, training, data = resolved.run, resolved.run.training, resolved.run.data
        schedule = training.lr_schedule
        adapter = run.finetune if isinstance(run.finetune, LoraSpec) else None
        # axolotl refuses bitsandbytes' 8-bit AdamW under FSDP2, and names torchao's
        torchao = run.layout.zero_stage and training.optimizer.name == "adamw_8bit"
        return {
            **written(AXOLOTL_RULES, AXOLOTL.split(), resolved),
            **_given(written(AXOLOTL_RULES, AXOLOTL_GIVEN.split(), resolved)),
            **written(HF_RULES, TRAINER.split(), resolved),
            "datasets": [_axolotl_dataset(source) for source in data.sources],
            "chat_template": unless(data.chat.template, "auto"),
            "val_set_size": data.held_out,
            "sample_packing": PACKED.write(data.packing),
            **(BASES.write(adapter.base) if adapter else {}),
            "lora_target_modules": list(adapter.targets) if adapter and adapter.targets != "all-linear" else None,
            **({"optimizer": "adamw_torch_8bit"} if torchao else {}),
            "cosine_min_lr_ratio": schedule.final if schedule.name == "cosine" and schedule.final else None,
            "lr_scheduler": SCHEDULES.write(schedule.name),
            "gradient_checkpointing": fully(resolved),
            "save_steps": run.checkpoint.every,
            "eval_steps": training.evaluation.every,
            "wandb_project": Path(run.run_dir).name if "wandb" in run.tracker_names else None,
            **(SHARDED if run.layout.zero_stage == 3 else {}),
        }


def _axolotl_dataset(source: Any) -> dict[str, Any]:
    keys = {"type": TYPES.write(source.format), "ds_type": None if is_remote(source) else "json"}
    return stated(named_data(source, "path", "name", "split") | keys)


class LlamaFactoryConfig(YamlEngine):
    """LLaMA-Factory's YAML."""

    name = "llama_factory"
    about = "LLaMA-Factory"
    file = "llama_factory.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, BITS, TRAINED, ORDERS)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models without a directory, other optimizers, schedules and data."""
        run, refusals = resolved.run, refused_model(resolved, "LLaMA-Factory")
        schedule = run.training.lr_schedule
        if schedule.name != "constant" and schedule.final:
            refusals["training.lr_schedule.final"] = "this export's schedules decay to 0; set it to 0"
        if run.layout.zero_stage:
            refusals["layout.zero"] = (
                "LLaMA-Factory's YAML does not describe sharding; set layout.zero=0, and give LLaMA-Factory a "
                "DeepSpeed JSON"
            )
        if bad := [source.path for source in run.data.sources if source.format not in RECORDS]:
            refusals["data.sources"] = f"set the format of {bad[0]}: {', '.join(RECORDS)}"
        return refusals

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
            **written(FACTORY_RULES, FACTORY.split(), resolved),
            **_given(written(FACTORY_RULES, FACTORY_GIVEN.split(), resolved)),
            **written(HF_RULES, TRAINER.split(), resolved),
            "stage": "dpo" if preference else "pt" if texts else "sft",
            "do_train": True,
            **_method(resolved),
            "dataset": ",".join(_named(resolved)),
            "dataset_dir": ".",
            "template": data.chat.template if data.chat.template in TEMPLATES else None,
            "packing": packed,
            "neat_packing": True if packed and data.separate_documents and not texts else None,
            "val_size": data.held_out,
            "lr_scheduler_type": SCHEDULES.write(schedule.name),
            "disable_gradient_checkpointing": not fully(resolved),
            "save_steps": run.checkpoint.every or training.steps,
            "logging_steps": 1,
            "report_to": list(run.tracker_names) or "none",
        }


def _named(resolved: ResolvedRun) -> dict[str, Any]:
    """The sources by names; two of one name get numbers."""
    sources: dict[str, Any] = {}
    for number, source in enumerate(resolved.run.data.sources):
        stem = Path(source.path.removeprefix("hub:")).name.partition(".")[0]
        sources[stem if stem not in sources else f"{stem}_{number}"] = source
    return sources


def _entry(source: Any) -> dict[str, Any]:
    described = named_data(source, "hf_hub_url" if is_remote(source) else "file_name", "subset", "split")
    form = dict(DESCRIBED.write(source.format))
    if source.format == "text":
        form["columns"] = {"prompt": source.text_key}
    return stated({**described, **form})


def _method(resolved: ResolvedRun) -> dict[str, Any]:
    finetune = resolved.run.finetune
    if not isinstance(finetune, LoraSpec):
        last = finetune.last_layers if isinstance(finetune, FullSpec) else None
        return {"finetuning_type": "freeze", "freeze_trainable_layers": last} if last else {"finetuning_type": "full"}
    every = finetune.targets == "all-linear"
    return {
        "finetuning_type": "lora",
        "adapter_name_or_path": finetune.start_from,
        "lora_target": "all" if every else ",".join(finetune.targets),
        "additional_target": ",".join(finetune.train) or None,
        "loraplus_lr_ratio": unless(finetune.b_lr_ratio, 1),
        "quantization_bit": BITS.write(finetune.base),
        "double_quantization": finetune.double_quantization if finetune.base == "nf4" else None,
    }
