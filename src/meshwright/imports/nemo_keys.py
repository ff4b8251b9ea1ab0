"""The keys of Megatron-Bridge's ConfigContainer and of NeMo's YAML before it: most are Megatron-LM's flags."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.nemo_precision import SECTION, mixed, named, reduced
from meshwright.imports.reading import Reading, Rule, apply, fact, nothing, positive, words
from meshwright.imports.schedules import lose_schedule

SCHEDULES = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupHoldPolicy": "constant"}
OURS = "Meshwright decides it"
SHOWN = "it does not affect training"


def _flag(name: str) -> Rule:
    """The meaning of Megatron-LM's flag of this name."""
    return FLAGS[name]


def _gated(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.fact("swiglu", True, origin)


def _activation(reading: Reading, value: Any, origin: str) -> None:
    """NeMo's word for the activation, which tells whether layers are gated."""
    if str(value).removeprefix("fast-") in ("swiglu", "silu"):
        reading.fact("swiglu", True, origin)
    elif str(value) not in ("gelu", "openai-gelu"):
        reading.give_up(origin, "supported: swiglu, gelu")


def _function(reading: Reading, value: Any, origin: str) -> None:
    """The function of Megatron-Bridge; another key tells whether layers are gated."""
    word = "silu" if "silu" in str(value) else "gelu" if "gelu" in str(value) else ""
    if word:
        reading.fact("activation", word, origin)
    elif not isinstance(value, Mapping):
        reading.give_up(origin, "supported: silu, gelu")


def _normalization(reading: Reading, value: Any, origin: str) -> None:
    norms = {"layernorm": "LayerNorm", "low_precision_layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    reading.fact("normalization", norms.get(str(value).lower(), str(value)), origin)


def _positions(reading: Reading, value: Any, origin: str) -> None:
    if value in ("rope", "learned_absolute"):
        reading.fact("positions", value, origin)
    else:
        reading.give_up(origin, "supported: rope, learned_absolute")


def _shared(reading: Reading, value: Any, origin: str) -> None:
    reading.set("model.tied_embeddings", bool(value), origin)


def _zero(reading: Reading, value: Any, origin: str) -> None:
    stage = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(str(value))
    if stage is None:
        reading.give_up(origin, "supported: no_shard, optim, optim_grads, optim_grads_params")
    else:
        reading.fact("sharding", stage, origin)


def _distributed(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.fact("distributed optimizer", 1, origin)


def _optimizer(reading: Reading, value: Any, origin: str) -> None:
    word = str(value)
    if word in ("distributed_fused_adam", "mcore_distributed_optim"):
        reading.fact("zero", 1, origin)
    known = dict.fromkeys(("adam", "adamw", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim"), "adamw")
    apply(words("training.optimizer.name", known | {"muon": "muon"}), reading, value, origin)


def _schedule(reading: Reading, value: Any, origin: str) -> None:
    if value in SCHEDULES:
        reading.set("training.lr_schedule.name", SCHEDULES[value], origin)
    else:
        lose_schedule(reading, origin, f"supported: {', '.join(SCHEDULES)}")


def _betas(reading: Reading, value: Any, origin: str) -> None:
    reading.set("training.optimizer.betas", list(value), origin)


def _checked(reading: Reading, value: Any, origin: str) -> None:
    """NeMo's interval of evaluations; a number with a point is a share of an epoch."""
    if isinstance(value, float):
        reading.give_up(origin, "a share of an epoch; set training.evaluation.every, in steps")
    else:
        reading.set("training.evaluation.every", value, origin)


def _prefix(reading: Reading, value: Any, origin: str) -> None:
    parts = value if isinstance(value, list) else [value]
    apply(_flag("data-path"), reading, " ".join(str(part) for part in parts), origin)


def _blend(reading: Reading, value: Any, origin: str) -> None:
    paths, *weights = value if isinstance(value[0], list) else [value]
    given = (weights or [None])[0] or [None] * len(paths)
    sources = [
        {"path": f"{path}.bin"} | ({} if weight is None else {"weight": float(weight)})
        for path, weight in zip(paths, given, strict=True)
    ]
    reading.set("data.sources", sources, origin)


def _fields(part: str, names: Mapping[str, str]) -> dict[str, Rule]:
    """Keys of a section that are Megatron-LM's flags under other names."""
    return {f"{part}.{key}": _flag(flag) for key, flag in names.items()}


SIZES = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_query_groups": "num-query-groups",
    "kv_channels": "kv-channels",
    "max_position_embeddings": "max-position-embeddings",
    "rotary_base": "rotary-base",
    "layernorm_epsilon": "norm-epsilon",
    "init_method_std": "init-method-std",
    "num_moe_experts": "num-experts",
    "moe_router_topk": "moe-router-topk",
    "moe_aux_loss_coeff": "moe-aux-loss-coeff",
    "moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "tensor_model_parallel_size": "tensor-model-parallel-size",
    "pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "context_parallel_size": "context-parallel-size",
    "expert_model_parallel_size": "expert-model-parallel-size",
    "sequence_parallel": "sequence-parallel",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "rope_scaling": "use-rope-scaling",
    "rope_scaling_factor": "rope-scaling-factor",
    "deterministic_mode": "deterministic-mode",
    "recompute_granularity": "recompute-granularity",
    "recompute_method": "recompute-method",
    "recompute_num_layers": "recompute-num-layers",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "hidden_dropout": "hidden-dropout",
    "attention_dropout": "attention-dropout",
}
LEFT_TO_US = {
    "model": (
        *("_target_", "make_vocab_size_divisible_by", "apply_rope_fusion", "bias_activation_fusion", "fp16_lm_head"),
        *("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion", "transformer_impl"),
        *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "pipeline_dtype", "attention_softmax_in_fp32"),
        *("apply_query_key_layer_scaling", "persist_layer_norm", "attention_backend", "transformer_engine"),
        *("bias_gelu_fusion", "bias_dropout_add_fusion", "megatron_amp_O2", "mcore_gpt", "params_dtype"),
        *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "autocast_dtype"),
        *("deallocate_pipeline_outputs", "use_cpu_initialization", "should_pad_vocab"),
    ),
    "train": ("exit_signal_handler", "manual_gc", "manual_gc_interval", "manual_gc_eval", "log_interval", "_target_"),
    "ddp": ("overlap_grad_reduce", "overlap_param_gather", "average_in_collective", "bucket_size", "_target_",
            "check_for_nan_in_grad"),
    "dataset": ("num_workers", "dataloader_type", "data_sharding", "pin_memory", "persistent_workers", "_target_",
                "path_to_cache", "skip_getting_attention_mask_from_dataset", "eod_mask_loss"),
    "optimizer": ("_target_", "overlap_param_gather_with_optimizer_step", "barrier_with_L1_time"),
    "scheduler": ("_target_", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_warmup_init",
                  "override_opt_param_scheduler"),
    "logger": ("_target_", "log_interval", "log_throughput", "wandb_exp_name", "log_timers_to_tensorboard"),
    "checkpoint": ("_target_", "ckpt_format", "fully_parallel_save", "async_save", "save_optim", "save_rng"),
    "tokenizer": ("_target_", "tokenizer_type"),
    "validation": ("_target_",),
    "rng": ("_target_", "te_rng_tracker"),
    "dist": ("_target_", "distributed_backend", "distributed_timeout_minutes", "use_gloo_process_groups"),
}  # fmt: skip

RULES: Mapping[str, Rule] = {
    **_fields("model", SIZES),
    **_fields("trainer.strategy", SIZES),
    "model.vocab_size": "model.vocab",
    "model.seq_length": "data.sequence_length",
    "model.encoder_seq_length": "data.sequence_length",
    "model.gated_linear_unit": _gated,
    "model.activation": _activation,
    "model.activation_func": _function,
    "model.activation_func._target_": _function,
    "model.activation_func._call_": nothing(SHOWN),
    "model.add_bias_linear": fact("biases"),
    "model.bias": fact("biases"),
    "model.add_qkv_bias": lambda reading, value, origin: reading.fact("qkv bias", True, origin) if value else None,
    "model.position_embedding_type": _positions,
    "model.normalization": _normalization,
    "trainer.strategy.normalization": _normalization,
    "model.share_embeddings_and_output_weights": _shared,
    "model.rotary_percent": lambda reading, value, origin: (
        None if value == 1 else reading.give_up(origin, "rope always rotates the whole head")
    ),
    "model.qk_layernorm": lambda reading, value, origin: reading.fact("qk norm", True, origin) if value else None,
    "model.precision": named,
    "model.seed": "training.seed",
    "model.micro_batch_size": "training.micro_batch",
    "model.global_batch_size": "training.global_batch",
    "model.optim.name": _optimizer,
    "model.optim.lr": "training.optimizer.lr",
    "model.optim.weight_decay": "training.optimizer.weight_decay",
    "model.optim.betas": _betas,
    "model.optim.eps": "training.optimizer.eps",
    "model.optim.sched.name": _schedule,
    "model.optim.sched.warmup_steps": "training.lr_schedule.warmup",
    "model.optim.sched.warmup_ratio": fact("warmup_ratio"),
    "model.optim.sched.constant_steps": lambda reading, value, origin: (
        reading.give_up(origin, "a cosine always decays until the last step") if value else None
    ),
    "model.optim.sched.min_lr": fact("min_lr"),
    "model.data.data_prefix": _prefix,
    "model.data.splits_string": _flag("split"),
    "model.data.seq_length": "data.sequence_length",
    "model.data.reset_attention_mask": _flag("reset-attention-mask"),
    "model.data.reset_position_ids": _flag("reset-position-ids"),
    "model.tokenizer.model": "data.tokenizer",
    "model.tokenizer.type": "data.tokenizer",
    "trainer.devices": fact("ranks of a node"),
    "trainer.num_nodes": fact("nodes"),
    "trainer.precision": named,
    "trainer.max_steps": "training.steps",
    "trainer.gradient_clip_val": positive("training.clip"),
    "trainer.val_check_interval": _checked,
    "trainer.limit_val_batches": "training.evaluation.batches",
    "trainer.accumulate_grad_batches": lambda reading, value, origin: None,  # follows from the batches
    "exp_manager.explicit_log_dir": "run_dir",
    "exp_manager.create_wandb_logger": lambda reading, value, origin: (
        reading.set("trackers", ["wandb"], origin) if value is True else None
    ),
    "exp_manager.checkpoint_callback_params.save_top_k": "checkpoint.keep_last",
    "train.micro_batch_size": "training.micro_batch",
    "train.global_batch_size": "training.global_batch",
    "train.train_iters": "training.steps",
    "train.train_samples": fact("samples"),
    "train.num_epochs": fact("epochs"),
    "train.rampup_batch_size": _flag("rampup-batch-size"),
    "train.eval_interval": _flag("eval-interval"),
    "train.eval_iters": "training.evaluation.batches",
    "validation.eval_interval": _flag("eval-interval"),
    "validation.eval_iters": "training.evaluation.batches",
    "optimizer.optimizer": _optimizer,
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.min_lr": fact("min_lr"),
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "optimizer.adam_beta1": fact("beta1"),
    "optimizer.adam_beta2": fact("beta2"),
    "optimizer.adam_eps": "training.optimizer.eps",
    "optimizer.clip_grad": positive("training.clip"),
    "optimizer.bf16": mixed("bf16"),
    "optimizer.fp16": mixed("fp16"),
    "optimizer.use_distributed_optimizer": _distributed,
    "optimizer.use_precision_aware_optimizer": nothing(
        "set training.optimizer.name=adamw_8bit for one byte per moment"
    ),
    "optimizer.optimizer_cpu_offload": lambda reading, value, origin: (
        reading.give_up(origin, "set layout.offload={optimizer: host}") if value else None
    ),
    "scheduler.lr_decay_style": _flag("lr-decay-style"),
    "scheduler.lr_warmup_iters": "training.lr_schedule.warmup",
    "scheduler.lr_warmup_fraction": fact("warmup_ratio"),
    "scheduler.lr_decay_iters": fact("decay steps"),
    "scheduler.max_steps": fact("decay steps"),
    "scheduler.lr_wsd_decay_iters": "training.lr_schedule.decay",
    "scheduler.lr_warmup_samples": _flag("lr-warmup-samples"),
    "scheduler.lr_decay_samples": _flag("lr-decay-samples"),
    "scheduler.lr_wsd_decay_samples": _flag("lr-wsd-decay-samples"),
    "scheduler.lr_wsd_decay_style": _flag("lr-wsd-decay-style"),
    "ddp.use_distributed_optimizer": _distributed,
    "ddp.data_parallel_sharding_strategy": _zero,
    "ddp.use_megatron_fsdp": lambda reading, value, origin: None,  # the strategy determines how much is sharded
    "ddp.use_custom_fsdp": lambda reading, value, origin: None,
    "ddp.grad_reduce_in_fp32": reduced,
    "ddp.num_distributed_optimizer_instances": fact("instances"),
    "dataset.sequence_length": "data.sequence_length",
    "dataset.seq_length": "data.sequence_length",
    "dataset.random_seed": nothing("training.seed also shuffles the data"),
    "dataset.blend": _blend,
    "dataset.data_path": _prefix,
    "dataset.split": _flag("split"),
    "dataset.reset_attention_mask": _flag("reset-attention-mask"),
    "dataset.reset_position_ids": _flag("reset-position-ids"),
    "dataset.mock": nothing("set data.sources (default: the Python standard library's text)"),
    "checkpoint.save": "run_dir",
    "checkpoint.save_interval": _flag("save-interval"),
    "checkpoint.most_recent_k": lambda reading, value, origin: (
        reading.set("checkpoint.keep_last", value, origin) if value > 0 else None
    ),
    "checkpoint.load": _flag("load"),
    "checkpoint.pretrained_checkpoint": nothing(
        "export the checkpoint to Hugging Face's format, and set model.name to its folder"
    ),
    "tokenizer.tokenizer_model": "data.tokenizer",
    "rng.seed": "training.seed",
    "logger.tensorboard_dir": _flag("tensorboard-dir"),
    "logger.wandb_project": lambda reading, value, origin: reading.set("trackers", ["wandb"], origin),
    **{f"{part}.{key}": nothing(OURS) for part, keys in LEFT_TO_US.items() for key in keys},
    "_target_": nothing(SHOWN),
    "name": nothing(SHOWN),
}

STATES = {
    **{f"{part}.{key}": flag for part in ("model", "trainer.strategy") for key, flag in SIZES.items()},
    "model.normalization": "normalization",
    "model.position_embedding_type": "position-embedding-type",
    "model.share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "model.add_bias_linear": "disable-bias-linear",
    "model.bias": "disable-bias-linear",
    "scheduler.lr_decay_style": "lr-decay-style",
    "scheduler.lr_wsd_decay_style": "lr-wsd-decay-style",
    "train.eval_interval": "eval-interval",
    "validation.eval_interval": "eval-interval",
}
"""Key -> Megatron-LM's flag about the same."""
NAMES = {
    **{flag: key for key, flag in reversed(STATES.items())},
    "swiglu": "model.gated_linear_unit",
    "fp8-format": f"{SECTION}.fp8",
    "fp4-format": f"{SECTION}.fp4",
    "first-last-layers-bf16": f"{SECTION}.first_last_layers_bf16",
    "bf16": f"{SECTION}=bf16_mixed",
    "lr": "optimizer.lr",
}
"""Megatron-LM's flag -> Megatron-Bridge's key."""
