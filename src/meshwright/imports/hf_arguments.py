"""TrainingArguments of Hugging Face transformers, as YAML or JSON."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_yaml import BACKEND, MODE, PRECISION, SHARDING
from meshwright.imports.accelerate_yaml import RULES as ACCELERATE_RULES
from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.deepspeed import read_named
from meshwright.imports.experts import COMPUTES
from meshwright.imports.hf_schedules import (
    EVALUATES,
    SAVES,
    TYPE,
    check_schedule,
    every,
    keep_options,
    settle_intervals,
    settle_schedule,
    strategy,
)
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import (
    above_zero,
    both,
    fact,
    in_turn,
    no_effects,
    only,
    positive,
    sets,
    unsupported,
    when,
    without,
    words,
)
from meshwright.imports.trl_arguments import RULES as TRL_RULES
from meshwright.imports.trl_arguments import settle_trl

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "paged_adamw_32bit": "paged_adamw",
    "muon": "muon",
}
HYBRID = (
    "shards within a machine, whose number of GPUs is unknown; the recipe shards over all ranks; set layout.dp_shard "
    "and layout.dp_replicate"
)


def _trackers(reading: Reading, value: Any, origin: str) -> None:
    names = [value] if isinstance(value, str) else list(value or [])
    for name in names:
        if name in ("tensorboard", "wandb"):
            reading.track(name, origin)
        elif name != "none":
            reading.drop(origin, f"{name} is not a built-in tracker; write a plug-in (docs/plugins.md)")
    if not set(names) - {"none"}:
        reading.claim(origin, Has("trackers", []))


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    if isinstance(value, bool):  # as `fsdp: true`, which fsdp_config completes
        reading.fact("fsdp", value, origin)
        return
    words = value.split() if isinstance(value, str) else [str(word) for word in value or []]
    for word in words:
        if word in SHARDING:
            reading.fact("zero", SHARDING[word], origin)
            if word.startswith("hybrid_shard"):
                reading.notes.append(f"{origin}: {HYBRID}")
        elif word == "offload":
            reading.set("layout.offload", "cpu", origin)
        elif word != "auto_wrap":
            reading.drop(origin, "Meshwright always shards block by block")
    if not words:
        reading.claim(origin, Always("the Trainer does not shard"))


def _warmup(reading: Reading, value: Any, origin: str) -> None:
    """Steps; below 1, a share of all."""
    if 0 < value < 1:
        reading.fact("warmup_ratio", value, origin)
    else:
        reading.set("training.lr_schedule.warmup", int(value), origin)


def _precision(name: str) -> Rule:
    """A switch of the Trainer, which replaces Accelerate's precision; here the first file's counts."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value is not True:
            reading.claim(origin, HasNot("training.precision", name))
            return
        accelerates, where = reading.facts.get(PRECISION, (name, ""))
        if accelerates != name and reading.settings.get("training.precision", (name, ""))[0] != name:
            reading.notes.append(
                f"{origin}: the Trainer takes this, not Accelerate's precision ({where}); the recipe has that of the "
                "first file, so give the Trainer's file first"
            )
        reading.set("training.precision", name, origin)

    return both(rule, lambda get: get("training.precision") == name)


def _settle_fsdp(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """`fsdp_config`, whose keys are Accelerate's, with or without their prefix; it has no effect without `fsdp`."""
    config = values.get("fsdp_config")
    if isinstance(reading.known("fsdp"), bool) and not reading.known("fsdp"):
        reading.claim(reading.facts["fsdp"][1], Always("the Trainer does not shard"))
    if isinstance(config, Mapping) and values.get("fsdp"):
        named = {f"fsdp_config.fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in config.items()}
        newer = isinstance(named.get("fsdp_config.fsdp_reshard_after_forward"), bool)  # FSDP2's word, which counts
        stage, stage_origin = reading.facts.get("zero", (0, ""))
        if newer and stage_origin.startswith(f"{file}: fsdp="):
            del reading.facts["zero"]
            reading.claim(stage_origin, Has("layout.zero", stage))
        trainers = {"fsdp_config.fsdp_cpu_offload": ACCELERATE_RULES["fsdp_config.fsdp_offload_params"]}
        reading.take(named, {**ACCELERATE_RULES, **trainers}, file)
    elif config:
        reading.drop(f"{file}: fsdp_config={config}", "it has no effect without fsdp, or is a file: pass that too")
    if reading.known("fsdp"):
        if "zero" not in reading.facts:
            reading.fact("zero", 3, reading.facts["fsdp"][1])
        reading.claim(reading.facts["fsdp"][1], HasNot("layout.zero", "auto"))


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LOGS: {
        "": "logging_steps logging_dir logging_strategy logging_first_step disable_tqdm log_level log_level_replica "
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second "
        "skip_memory_metrics project trackio_space_id"
    },
    NoEffect.NAMES: {"": "run_name"},
    NoEffect.READS: {
        "": "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns "
        "dataloader_persistent_workers"
    },
    NoEffect.OVERLAP: {"": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers"},
    NoEffect.GUARDS: {"": "ddp_timeout debug"},
    NoEffect.MEMORY: {"": "gradient_checkpointing_kwargs torch_empty_cache_steps"},
    NoEffect.KERNEL: {"": "use_liger_kernel liger_kernel_config"},
    NoEffect.SAVES: {"": "overwrite_output_dir save_safetensors save_only_model save_on_each_node "
                     "enable_jit_checkpoint"},
    NoEffect.HUB: {
        "": "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision"
    },
    NoEffect.EVALUATES: {
        "": "do_eval do_predict per_device_eval_batch_size eval_accumulation_steps eval_delay eval_on_start "
        "prediction_loss_only include_for_metrics batch_eval_metrics eval_do_concat_batches bf16_full_eval "
        "fp16_full_eval eval_use_gather_object"
    },
    NoEffect.LAUNCH: {"": "local_rank ddp_backend"},
}  # fmt: skip
BEST = "the last weights are the result; set checkpoint.keep_best to keep the best ones"
RULES: Mapping[str, Rule] = {
    "learning_rate": "training.optimizer.lr",
    "weight_decay": "training.optimizer.weight_decay",
    "adam_beta1": fact("beta1"),
    "adam_beta2": fact("beta2"),
    "adam_epsilon": "training.optimizer.eps",
    "max_grad_norm": positive("training.clip"),
    "optim": words("training.optimizer.name", OPTIMIZERS),
    "lr_scheduler_type": fact(TYPE, check=check_schedule),
    "lr_scheduler_kwargs": keep_options,
    "warmup_steps": both(_warmup, lambda get: get("training.lr_schedule.warmup")),
    "warmup_ratio": fact("warmup_ratio"),
    "max_steps": above_zero("training.steps", Always("the epochs count")),
    "num_train_epochs": fact("epochs"),
    "per_device_train_batch_size": "training.micro_batch",
    "gradient_accumulation_steps": fact("accumulation"),
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "gradient_checkpointing": when("training.recompute", "full", Has("training.recompute", "none")),
    "torch_compile": when("training.compile", True),
    "torch_compile_backend": BACKEND,  # these two switch it on
    "torch_compile_mode": in_turn(sets({"training.compile": True}), MODE),
    "seed": "training.seed",
    "data_seed": without("training.seed also shuffles the data"),
    "full_determinism": when("training.deterministic", True),
    "save_steps": every(SAVES),
    "save_strategy": strategy(SAVES),
    **dict.fromkeys(("evaluation_strategy", "eval_strategy"), strategy(EVALUATES)),
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": every(EVALUATES),
    "output_dir": "run_dir",
    "report_to": _trackers,
    "fsdp": _sharding,
    "deepspeed": read_named,
    "label_smoothing_factor": unsupported("label smoothing is not supported"),
    "neftune_noise_alpha": unsupported("noise on embeddings is not supported"),
    "group_by_length": unsupported("use data.packing=best_fit instead"),
    "do_train": only(True, "a recipe always trains"),
    "tf32": unsupported("fp32 products are as PyTorch computes them by default"),
    "use_cpu": when("device", "cpu"),
    "resume_from_checkpoint": unsupported("`meshwright train --resume` continues from the newest checkpoint"),
    "auto_find_batch_size": unsupported("training.micro_batch stays as it is set"),
    "load_best_model_at_end": unsupported(BEST),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), without(BEST)),
    **no_effects(NO_EFFECT),
}
ALL_RULES: Mapping[str, Rule] = {**RULES, **TRL_RULES}
"""Of files that hold TRL's arguments, too."""


def is_hf_arguments(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of TrainingArguments."""
    return "per_device_train_batch_size" in values or ("output_dir" in values and "learning_rate" in values)


def read_hf_arguments(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read TrainingArguments; omitted fields get the Trainer's defaults where those differ from ours."""
    arguments = {key: value for key, value in values.items() if key != "fsdp_config"}
    reading.take(deepspeed_first(arguments), ALL_RULES, file)
    settle_intervals(reading, values, f"{file} (the Trainer's default)")
    _settle_fsdp(reading, values, file)
    take_defaults(reading, values, f"{file} (the Trainer's default)", "linear")
    take_length(reading, values, f"{file} (the Trainer's default)")
    reading.default("training.precision", "fp32", f"{file} (neither bf16 nor fp16)")
    settle_trl(reading, values, file)
    reading.facts.setdefault(COMPUTES, (file, file))


def deepspeed_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with DeepSpeed's configuration in front, since it wins."""
    return {"deepspeed": values.get("deepspeed"), **values}


def take_length(reading: Reading, values: Mapping[str, Any], origin: str) -> None:
    """The Trainer's batch of 8 and its 3 epochs, where neither these nor other files give another."""
    reading.otherwise("training.micro_batch", 8, origin)
    if "num_train_epochs" not in values:
        reading.fact("epochs", 3, f"{origin}: num_train_epochs=3")


def take_defaults(reading: Reading, values: Mapping[str, Any], origin: str, schedule: str) -> None:
    """The defaults of the Trainer, and of systems on top of it, for fields that `values` omits. `schedule`: the default
    one."""
    reading.default("training.optimizer.lr", 5e-5, origin)
    reading.default("training.optimizer.weight_decay", 0.0, origin)
    if "adam_beta2" not in values and "training.optimizer.betas" not in reading.settings:
        reading.fact("beta2", 0.999, origin)
    settle_schedule(reading, schedule, origin)
    if "warmup_ratio" not in reading.facts:
        reading.default("training.lr_schedule.warmup", 0, origin)
    reading.default("training.seed", 42, origin)
