"""axolotl's YAML configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_yaml import RULES as ACCELERATE_RULES
from meshwright.imports.axolotl_data import chat_template, read_datasets
from meshwright.imports.axolotl_intervals import RULES as INTERVAL_RULES
from meshwright.imports.axolotl_intervals import settle_intervals
from meshwright.imports.axolotl_ranks import RULES as RANK_RULES
from meshwright.imports.axolotl_ranks import settle_batch, settle_preference, settle_ranks
from meshwright.imports.deepspeed_schedules import FINAL, SCHEDULE
from meshwright.imports.hf_arguments import HYBRID, take_defaults
from meshwright.imports.hf_arguments import RULES as HF_RULES
from meshwright.imports.reading import Reading, Rule, check_count, check_number
from meshwright.imports.rules import apply, choice, fact, if_any, ignored, nothing, when, words


def _packing(reading: Reading, value: Any, origin: str) -> None:
    reading.set("data.packing", "best_fit" if value else "padded", origin)
    if value:
        reading.set("data.separate_documents", True, origin)


def _bf16(reading: Reading, value: Any, origin: str) -> None:
    if value == "full":
        reading.give_up(origin, "set training.precision=bf16 and training.master_dtype=bf16")
    elif value is True:
        reading.set("training.precision", "bf16", origin)


def _evaluation(reading: Reading, value: Any, origin: str) -> None:
    if isinstance(value, float) and value < 1:
        reading.set("data.held_out", value, origin)
    elif value:
        reading.give_up(origin, "data.held_out is a fraction, not a count")
    else:
        reading.set("data.held_out", 0, origin)


def _warmup(reading: Reading, value: Any, origin: str) -> None:
    """axolotl warms up for 2 steps where it is told 1; a number below 1 is a share."""
    apply(HF_RULES["warmup_steps"], reading, 2 if value == 1 else value, origin)


def _kept(reading: Reading, value: Any, origin: str) -> None:
    """axolotl keeps 4 checkpoints where it is told 0."""
    check_number(value, origin)
    reading.set("checkpoint.keep_last", value or MOST_KEPT, origin)


def _tell_defaults(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Name the defaults that the recipe does not take over."""
    if "save_total_limit" not in values:
        reading.notes.append(
            f"{file} has no save_total_limit: axolotl keeps {MOST_KEPT} checkpoints; checkpoint.keep_last decides here"
        )
    sources = reading.value("data.sources", [])
    if "excess_length_strategy" not in values and any(source.get("format") != "text" for source in sources):
        reading.notes.append(
            f"{file} has no excess_length_strategy: axolotl drops records longer than a sample, a recipe stops at "
            "them; set data.chat.overlong=drop for the same"
        )


def _targets(reading: Reading, value: Any, origin: str) -> None:
    if isinstance(value, list) or value == "all-linear":
        reading.set("finetune.targets", value, origin)
    else:
        reading.give_up(origin, "a regular expression; list patterns in finetune.targets, as in [q_proj, v_proj]")


def _sharded(reading: Reading, value: Any, origin: str) -> None:
    """FSDP; the keys of its first version begin with fsdp_."""
    found = {str(key).removeprefix("fsdp_"): said for key, said in value.items()}
    where = origin.split("=")[0]
    shards = found.pop("reshard_after_forward", True)
    if "fsdp" not in reading.known("keys", ()):
        reading.fact("zero", 2 if shards is False else 3, f"{where}.reshard_after_forward={shards}")
    if found.pop("offload_params", False):
        reading.set("layout.offload", "cpu", f"{where}.offload_params=True")
    if found.pop("activation_checkpointing", False):
        reading.set("training.recompute", "full", f"{where}.activation_checkpointing=True")
    if (strategy := found.pop("sharding_strategy", None)) is not None and "fsdp" not in reading.known("keys", ()):
        reading.facts.pop("zero", None)
        rule = ACCELERATE_RULES["fsdp_config.fsdp_sharding_strategy"]
        said = f"{where}.sharding_strategy={strategy}"
        apply(rule, reading, strategy, said)
        if "hybrid" in reading.facts:
            reading.notes.append(f"{said}: {HYBRID}")
    found.pop("version", None)  # the same sharding
    if found.get("auto_wrap_policy") == "TRANSFORMER_BASED_WRAP":
        del found["auto_wrap_policy"]
    for key, said in found.items():
        reading.give_up(f"{where}.{key}={said}", "Meshwright always shards block by block, and has its own checkpoints")


MOST_KEPT = 4
"""Checkpoints that axolotl keeps."""
LEAST = "the cosine's least rate"
LEFT_TO_US = (
    *("attn_implementation", "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation"),
    *("liger_fused_linear_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "wandb_log_model"),
    *("flash_attention", "sdp_attention", "xformers_attention", "dataset_prepared_path", "tf32", "logging_steps"),
    *("group_by_length", "pad_to_sequence_len", "strict", "trust_remote_code", "model_type", "tokenizer_type"),
    *("is_llama_derived_model", "gradient_checkpointing_kwargs", "dataset_processes"),
    *("eval_sample_packing", "save_safetensors", "debug", "wandb_entity", "wandb_watch", "wandb_name", "local_rank"),
)

ORDER = {"deepspeed": 0, "lora_target_linear": 0, "fp16": 2}
"""Keys that count before the others, and after them: DeepSpeed's configuration wins, bf16 overrules fp16."""
DATASETS = ("datasets", "pretraining_dataset")
SHARED = (
    *("gradient_accumulation_steps", "max_steps", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "warmup_ratio", "bf16", "fp16", "gradient_checkpointing", "torch_compile"),
    *("seed", "output_dir", "deepspeed", "fsdp"),
)
"""Keys that axolotl passes to the Trainer unchanged."""

RULES: Mapping[str, Rule] = {
    "base_model": "model.name",
    "tokenizer_config": "data.tokenizer",
    "test_datasets": nothing("evaluation data are a share of the training data; set data.held_out"),
    "chat_template": chat_template,
    "train_on_inputs": when("data.chat.train_on", "all"),
    "sequence_len": "data.sequence_length",
    "sample_packing": _packing,
    "adapter": choice("finetune.method", {"lora": "lora", "qlora": "qlora"}),
    "load_in_4bit": when("finetune.base", "nf4"),
    "load_in_8bit": if_any("finetune.base", "int8"),
    "lora_r": "finetune.rank",
    "lora_alpha": "finetune.alpha",
    "lora_dropout": "finetune.dropout",
    "lora_target_modules": _targets,
    "lora_target_linear": when("finetune.targets", "all-linear"),
    "lora_modules_to_save": "finetune.train",
    "peft_use_dora": when("finetune.dora", True),
    "peft_use_rslora": when("finetune.rslora", True),
    "micro_batch_size": "training.micro_batch",
    "num_epochs": fact("epochs"),
    **{name: HF_RULES[name] for name in SHARED},
    **RANK_RULES,
    **INTERVAL_RULES,
    "save_total_limit": _kept,
    "excess_length_strategy": words("data.chat.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"}),
    "unfrozen_parameters": nothing("set finetune.train to the modules that train"),
    "bf16": _bf16,
    "bfloat16": _bf16,
    "lora_model_dir": "finetune.start_from",
    "loraplus_lr_ratio": "finetune.b_lr_ratio",
    "loraplus_lr_embedding": nothing("embeddings train at the rate of A, or in full"),
    "warmup_steps": _warmup,
    "fsdp_config": _sharded,
    "fsdp_version": ignored,  # the same sharding
    "optimizer": HF_RULES["optim"],
    "lr_scheduler": HF_RULES["lr_scheduler_type"],
    "lr_scheduler_kwargs": HF_RULES["lr_scheduler_kwargs"],
    "cosine_min_lr_ratio": fact(LEAST),
    "val_set_size": _evaluation,
    "wandb_project": if_any("trackers", ["wandb"]),
    "special_tokens": nothing("the tokenizer's special tokens are used"),
    "early_stopping_patience": nothing("use the callback early_stopping (docs/callbacks.md)"),
    **dict.fromkeys(LEFT_TO_US, nothing("it does not affect training, or Meshwright decides it")),
}


def is_axolotl(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an axolotl configuration."""
    return "base_model" in values


def read_axolotl(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an axolotl configuration."""
    values = {key: value for key, value in values.items() if value is not None}
    reading.fact("keys", tuple(values), file)
    if values.get("bf16") == "auto":
        reading.set("training.precision", "bf16", f"{file}: bf16=auto (bf16 where the GPU has it, else fp16)")
    apart = {key: value for key, value in values.items() if key not in DATASETS and (key, value) != ("bf16", "auto")}
    reading.take(dict(sorted(apart.items(), key=lambda pair: ORDER.get(pair[0], 1))), RULES, file)
    read_datasets(reading, values, file)
    settle_batch(reading, values, file)
    settle_preference(reading, file)
    settle_ranks(reading)
    settle_intervals(reading, values, file)
    default = f"{file} (axolotl's default)"
    if not {"warmup_steps", "warmup_ratio"} & values.keys():
        if steps := reading.settings.get("training.steps", (None, ""))[0]:
            check_count(steps, reading.settings["training.steps"][1])
            _warmup(reading, min(int(0.03 * steps), 100), default)
        else:
            reading.fact("warmup_ratio", 0.03, f"{default}: warm-up of 3 % of the steps, at most 100")
    _least_rate(reading, values)
    take_defaults(reading, values, default, "cosine")
    reading.default("data.held_out", 0.0, default)
    _tell_defaults(reading, values, file)
    reading.default("data.sequence_length", 512, default)
    if "micro_batch_size" not in values:
        reading.set("training.micro_batch", 1, default)
    reading.default("training.precision", "fp32", f"{file} (neither bf16 nor fp16)")
    if not values.get("sample_packing"):
        reading.set("data.packing", "padded", f"{file} (axolotl's default: sample_packing=false)")
    if "adapter" not in values:
        _without_adapter(reading, file)


def _least_rate(reading: Reading, values: Mapping[str, Any]) -> None:
    """The least rate of axolotl's own cosine, which neither DeepSpeed's schedules nor others have."""
    if LEAST not in reading.facts:
        return
    share, origin = reading.facts[LEAST]
    check_number(share, origin)
    kind = values.get("lr_scheduler", "cosine")
    if SCHEDULE in reading.facts:
        reading.give_up(origin, f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")
    elif kind != "cosine":
        reading.give_up(origin, f"only lr_scheduler=cosine has it, not {kind}")
    elif share:
        reading.set(FINAL, share, origin)


def _without_adapter(reading: Reading, file: str) -> None:
    """All parameters train; the settings of an adapter have no effect."""
    for path in [path for path in reading.settings if path.startswith("finetune.")]:
        reading.give_up(reading.settings.pop(path)[1], "it has no effect without adapter")
    reading.set("finetune.method", "full", f"{file} (no adapter)")
