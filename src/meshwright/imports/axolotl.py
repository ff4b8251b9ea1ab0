"""axolotl's YAML configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_yaml import RULES as ACCELERATE_RULES
from meshwright.imports.accelerate_yaml import SHARDING
from meshwright.imports.axolotl_data import chat_template, read_datasets
from meshwright.imports.axolotl_intervals import RULES as INTERVAL_RULES
from meshwright.imports.axolotl_intervals import settle_intervals
from meshwright.imports.axolotl_ranks import RULES as RANK_RULES
from meshwright.imports.axolotl_ranks import settle_batch, settle_preference, settle_ranks
from meshwright.imports.claims import Has, HasNot, NoEffect
from meshwright.imports.deepspeed_schedules import FINAL, SCHEDULE
from meshwright.imports.experts import COMPUTES, override_rules
from meshwright.imports.hf_arguments import HYBRID, take_defaults
from meshwright.imports.hf_arguments import RULES as HF_RULES
from meshwright.imports.reading import Reading, Rule, check_count, check_number
from meshwright.imports.rules import (
    apply,
    cases,
    choice,
    fact,
    held_out,
    if_any,
    if_so,
    in_turn,
    no_effects,
    no_tracker,
    only,
    peft,
    sets,
    tracker,
    unsupported,
    when,
    without,
    words,
)


def _warmup(reading: Reading, value: Any, origin: str) -> None:
    """axolotl warms up for 2 steps where the key is 1; a number below 1 is a share."""
    apply(HF_RULES["warmup_steps"], reading, 2 if value == 1 else value, origin)


def _kept(reading: Reading, value: Any, origin: str) -> None:
    """axolotl keeps 4 checkpoints where the key is 0."""
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
        reading.drop(origin, "a regular expression; list patterns in finetune.targets, as in [q_proj, v_proj]")


def _recomputed(reading: Reading, value: Any, origin: str) -> None:
    """Whether layers recompute; a word says where their inputs are kept."""
    apply(HF_RULES["gradient_checkpointing"], reading, bool(value), origin)
    if isinstance(value, str):
        reading.notes.append(
            f"{origin}: where activations are kept is not imported; set layout.offload={{activations: host}}"
        )


def _tracked(reading: Reading, value: Any, origin: str) -> None:
    """W&B is on where its project has a name, unless its mode is `disabled`."""
    if "wandb is off" in reading.facts:
        reading.no_effect.append((origin, NoEffect.OFF))
    elif value:
        reading.track("wandb", origin)
    else:
        reading.claim(origin, no_tracker("wandb"))


def _settle_sharding(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """FSDP's stage: `fsdp` counts first, then the sharding strategy, then whether weights are sharded again."""
    shards, origin = reading.facts.get("shards again", (True, f"{file}: fsdp_config (weights are sharded again)"))
    strategy, where = reading.facts.get("sharding strategy", (None, ""))
    if not isinstance(values.get("fsdp_config"), Mapping):
        return
    reading.claim(origin, Has("layout.zero", 2 if shards is False else 3))
    if "fsdp" in values:
        reading.claim(where, Has("layout.zero", SHARDING.get(str(strategy).lower())))
        return
    if strategy is not None:
        apply(ACCELERATE_RULES["fsdp_config.fsdp_sharding_strategy"], reading, strategy, where)
        if "hybrid" in reading.facts:
            reading.notes.append(f"{where}: {HYBRID}")
    else:
        reading.fact("zero", 2 if shards is False else 3, origin)


MOST_KEPT = 4
"""Checkpoints that axolotl keeps."""
LEAST = "the cosine's least rate"
CONFIGS = ("overrides_of_model_config", "model_config")
"""Sections of changes to the model's configuration; the second is the older name."""
BLOCKS = "Meshwright always shards block by block"
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.KERNEL: {
        "": "attn_implementation flash_attention sdp_attention xformers_attention flex_attention eager_attention "
        "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_fused_linear_cross_entropy "
        "liger_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel cut_cross_entropy use_kernels",
        "fsdp_config": "use_orig_params",
    },
    NoEffect.LOGS: {
        "": "logging_steps wandb_log_model wandb_entity wandb_watch wandb_name wandb_run_id trackio_project_name "
        "trackio_run_name trackio_space_id"
    },
    NoEffect.CACHE: {"": "dataset_prepared_path skip_prepare_dataset"},
    NoEffect.READS: {"": "dataset_processes dataset_num_proc dataloader_num_workers dataloader_prefetch_factor "
                     "dataloader_pin_memory remove_unused_columns"},
    NoEffect.MEMORY: {
        "": "pad_to_sequence_len gradient_checkpointing_kwargs low_cpu_mem_usage",
        "fsdp_config": "cpu_ram_efficient_loading sync_module_states",
    },
    NoEffect.OVERLAP: {
        "": "fsdp_version ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
        "fsdp_config": "version forward_prefetch backward_prefetch limit_all_gathers transformer_layer_cls_to_wrap",
    },
    NoEffect.GUARDS: {"": "strict debug ddp_timeout"},
    NoEffect.CODE: {"": "trust_remote_code"},
    NoEffect.CLASS: {"": "model_type tokenizer_type processor_type is_llama_derived_model"},
    NoEffect.EVALUATES: {"": "eval_sample_packing eval_batch_size eval_table_size eval_max_new_tokens"},
    NoEffect.SAVES: {"": "save_safetensors save_only_model",
                     "fsdp_config": "state_dict_type final_state_dict_type"},
    NoEffect.RESUMES: {"": "auto_resume_from_checkpoints"},
    NoEffect.LAUNCH: {"": "local_rank"},
    NoEffect.HUB: {"": "hub_model_id hub_strategy hf_use_auth_token push_dataset_to_hub"},
}  # fmt: skip

ORDER = {"deepspeed": 0, "lora_target_linear": 0, "wandb_mode": 0, "fp16": 2}
"""Keys that count before the others, and after them: DeepSpeed's configuration wins, bf16 overrules fp16."""
DATASETS = ("datasets", "pretraining_dataset")
SHARED = (
    *("gradient_accumulation_steps", "max_steps", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "warmup_ratio", "bf16", "fp16", "torch_compile", "seed", "output_dir"),
    *("deepspeed", "fsdp", "group_by_length", "tf32", "resume_from_checkpoint", "neftune_noise_alpha"),
)
"""Keys that axolotl passes to the Trainer unchanged."""

RULES: Mapping[str, Rule] = {
    "base_model": "model.name",
    "tokenizer_config": "data.tokenizer",
    "test_datasets": unsupported("evaluation data are a share of the training data; set data.held_out"),
    "chat_template": chat_template,
    "train_on_inputs": when("data.chat.train_on", "all"),
    "sequence_len": "data.sequence_length",
    "sample_packing": if_so(
        sets({"data.packing": "best_fit", "data.separate_documents": True}), sets({"data.packing": "padded"})
    ),
    "adapter": choice("finetune.method", {"lora": "lora", "qlora": "qlora"}),
    "load_in_4bit": when("finetune.base", "nf4"),
    "load_in_8bit": if_any("finetune.base", "int8"),
    **peft("lora_", "r", "lora_alpha", "lora_dropout", "modules_to_save"),
    **peft("peft_", "use_dora", "use_rslora"),
    "lora_target_modules": _targets,
    "lora_target_linear": when("finetune.targets", "all-linear"),
    "micro_batch_size": "training.micro_batch",
    "num_epochs": fact("epochs"),
    **{name: HF_RULES[name] for name in SHARED},
    **RANK_RULES,
    **INTERVAL_RULES,
    "save_total_limit": _kept,
    "excess_length_strategy": words("data.chat.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"}),
    "unfrozen_parameters": unsupported("set finetune.train to the modules that train"),
    **dict.fromkeys(
        ("bf16", "bfloat16"),
        cases(
            {
                "full": without("set training.precision=bf16 and training.master_dtype=bf16"),
                True: sets({"training.precision": "bf16"}),
            },
            HasNot("training.precision", "bf16"),
        ),
    ),
    "lora_model_dir": "finetune.start_from",
    "loraplus_lr_ratio": "finetune.b_lr_ratio",
    "loraplus_lr_embedding": without("embeddings train at the rate of A, or in full"),
    "warmup_steps": _warmup,
    "gradient_checkpointing": _recomputed,
    "fsdp_config.reshard_after_forward": fact("shards again"),
    "fsdp_config.sharding_strategy": fact("sharding strategy"),
    "fsdp_config.offload_params": when("layout.offload", "cpu", Has("layout.offload", "none")),
    "fsdp_config.activation_checkpointing": when("training.recompute", "full", Has("training.recompute", "none")),
    "fsdp_config.auto_wrap_policy": only("TRANSFORMER_BASED_WRAP", BLOCKS),
    "fsdp_config.*": without(f"{BLOCKS}, and has its own checkpoints"),
    "optimizer": HF_RULES["optim"],
    "lr_scheduler": HF_RULES["lr_scheduler_type"],
    "lr_scheduler_kwargs": HF_RULES["lr_scheduler_kwargs"],
    "cosine_min_lr_ratio": fact(LEAST),
    "val_set_size": cases(
        {float: held_out},
        if_so(without("data.held_out is a fraction, not a count"), sets({"data.held_out": 0})),
        type,
    ),
    **{key: rule for section in CONFIGS for key, rule in override_rules(section).items()},
    "wandb_project": _tracked,
    "wandb_mode": cases({"disabled": in_turn(fact("wandb is off", True), no_tracker("wandb"))}, NoEffect.LOGS),
    "use_wandb": when(Has("trackers", ["wandb"]), True, no_tracker("wandb")),
    "use_tensorboard": when(tracker("tensorboard"), True, no_tracker("tensorboard")),
    "special_tokens": unsupported("the tokenizer's special tokens are used"),
    "early_stopping_patience": unsupported("use the callback early_stopping (docs/callbacks.md)"),
    **no_effects(NO_EFFECT),
}


def is_axolotl(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an axolotl configuration."""
    return "base_model" in values


def read_axolotl(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an axolotl configuration."""
    values = {key: value for key, value in values.items() if value is not None}
    if values.get("bf16") == "auto":
        reading.set("training.precision", "bf16", f"{file}: bf16=auto (bf16 where the GPU has it, else fp16)")
    apart = {key: value for key, value in values.items() if key not in DATASETS and (key, value) != ("bf16", "auto")}
    for section in CONFIGS:
        if isinstance(changes := apart.get(section), Mapping) and changes:
            apart |= {f"{section}.{key}": value for key, value in apart.pop(section).items()}
    sharding = apart.get("fsdp_config")
    if isinstance(sharding, Mapping) and sharding:  # the keys of its first version begin with fsdp_
        del apart["fsdp_config"]
        apart |= {f"fsdp_config.{str(key).removeprefix('fsdp_')}": value for key, value in sharding.items()}
    reading.facts.setdefault(COMPUTES, (file, file))
    reading.take(dict(sorted(apart.items(), key=lambda pair: ORDER.get(pair[0], 1))), RULES, file)
    _settle_sharding(reading, values, file)
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
        reading.drop(origin, f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")
    elif kind != "cosine":
        reading.drop(origin, f"only lr_scheduler=cosine has it, not {kind}")
    elif share:
        reading.set(FINAL, share, origin)
    else:
        reading.claim(origin, Has(FINAL, 0.0))


def _without_adapter(reading: Reading, file: str) -> None:
    """All parameters train; the settings of an adapter have no effect."""
    reading.take_back("it has no effect without adapter", "finetune.")
    reading.set("finetune.method", "full", f"{file} (no adapter)")
