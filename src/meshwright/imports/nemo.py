"""Megatron-Bridge's ConfigContainer as YAML, and NeMo's YAML for Megatron models before it."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.megatron import replicas, rope_scaling
from meshwright.imports.megatron_combined import recomputation
from meshwright.imports.reading import Reading, Rule, apply, fact, flat, nothing, positive, words

PRECISIONS = {
    **dict.fromkeys(("bf16", "bf16_mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "fp16", "16_mixed", "fp16_mixed", "float16"), "fp16"),
    **dict.fromkeys(("32", "32_true", "fp32", "float32"), "fp32"),
    **dict.fromkeys(("bf16_with_fp8_mixed", "bf16_with_fp8_delayed_scaling_mixed", "fp8"), "fp8"),
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
SCHEDULES = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupHoldPolicy": "constant"}
OURS = "Meshwright decides it"
SHOWN = "it does not affect training"


def _flag(name: str) -> Rule:
    """The meaning of Megatron-LM's flag of this name."""
    return FLAGS[name]


def _gated(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.fact("gated", True, origin)


def _activation(reading: Reading, value: Any, origin: str) -> None:
    if any(word in str(value) for word in ("swiglu", "silu")):
        reading.fact("gated", True, origin)
    elif "gelu" not in str(value):
        reading.give_up(origin, "supported: SwiGLU, GELU")


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
        reading.give_up(origin, f"supported: {', '.join(SCHEDULES)}")


def _betas(reading: Reading, value: Any, origin: str) -> None:
    reading.set("training.optimizer.betas", list(value), origin)


def _precision(reading: Reading, value: Any, origin: str) -> None:
    if not isinstance(value, Mapping):
        apply(words("training.precision", PRECISIONS), reading, value, origin)


def _mixed(name: str) -> Rule:
    return lambda reading, value, origin: reading.set("training.precision", name, origin) if value is True else None


def _reduced(reading: Reading, value: Any, origin: str) -> None:
    reading.set("training.reduce_dtype", "fp32" if value else "bf16", origin)


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
    "normalization": "normalization",
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
    "model.activation_func": _activation,
    "model.activation_func._target_": _activation,
    "model.activation_func._call_": nothing(SHOWN),
    "model.add_bias_linear": fact("biases"),
    "model.bias": fact("biases"),
    "model.add_qkv_bias": lambda reading, value, origin: reading.fact("qkv bias", True, origin) if value else None,
    "model.position_embedding_type": _positions,
    "model.share_embeddings_and_output_weights": _shared,
    "model.rotary_percent": lambda reading, value, origin: (
        None if value == 1 else reading.give_up(origin, "rope always rotates the whole head")
    ),
    "model.qk_layernorm": lambda reading, value, origin: reading.fact("qk norm", True, origin) if value else None,
    "model.precision": _precision,
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
    "trainer.precision": _precision,
    "trainer.max_steps": "training.steps",
    "trainer.gradient_clip_val": positive("training.clip"),
    "trainer.val_check_interval": "training.evaluation.every",
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
    "optimizer.bf16": _mixed("bf16"),
    "optimizer.fp16": _mixed("fp16"),
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
    "scheduler.lr_wsd_decay_iters": "training.lr_schedule.decay",
    "scheduler.lr_wsd_decay_style": _flag("lr-wsd-decay-style"),
    "ddp.use_distributed_optimizer": _distributed,
    "ddp.data_parallel_sharding_strategy": _zero,
    "ddp.use_megatron_fsdp": lambda reading, value, origin: None,  # the strategy determines how much is sharded
    "ddp.use_custom_fsdp": lambda reading, value, origin: None,
    "ddp.grad_reduce_in_fp32": _reduced,
    "ddp.num_distributed_optimizer_instances": fact("instances"),
    "dataset.sequence_length": "data.sequence_length",
    "dataset.seq_length": "data.sequence_length",
    "dataset.random_seed": nothing("training.seed also shuffles the data"),
    "dataset.blend": _blend,
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
    "mixed_precision": _precision,
    "mixed_precision.bf16": _mixed("bf16"),
    "mixed_precision.fp16": _mixed("fp16"),
    "mixed_precision.grad_reduce_in_fp32": _reduced,
    **{f"{part}.{key}": nothing(OURS) for part, keys in LEFT_TO_US.items() for key in keys},
    "_target_": nothing(SHOWN),
    "name": nothing(SHOWN),
}


def is_nemo(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of a Megatron-Bridge or NeMo configuration."""
    model = values.get("model")
    known = isinstance(model, Mapping) and ("hidden_size" in model or "tensor_model_parallel_size" in model)
    return known and any(isinstance(values.get(part), Mapping) for part in ("train", "trainer"))


def read_nemo(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a NeMo or Megatron-Bridge configuration."""
    reading.take(flat(values), RULES, file)
    defaults = {"training.optimizer.betas": [0.9, 0.999], "training.optimizer.weight_decay": 0.01}
    defaults |= {"training.precision": "fp32", "training.lr_schedule.final": 0.0, "training.lr_schedule.warmup": 0}
    defaults |= {"training.lr_schedule.name": "linear", "training.seed": 1234}
    for path, default in defaults.items():
        reading.default(path, default, f"{file} (Megatron's default)")
    if "distributed optimizer" in reading.facts or "sharding" in reading.facts:
        stages = [reading.facts[name] for name in ("sharding", "distributed optimizer") if name in reading.facts]
        reading.fact("zero", *max(stages, key=lambda stage: stage[0]))
    _family(reading, file)
    rope_scaling(reading)
    if "model.name" not in reading.settings and "data.sequence_length" in reading.settings:
        reading.default("model.max_positions", *reading.settings["data.sequence_length"])
    if ranks := reading.known("ranks of a node"):
        nodes, where = reading.facts.get("nodes", (1, "one node"))
        reading.fact("ranks", ranks * nodes, f"{reading.facts['ranks of a node'][1]}; {where}")
    replicas(reading)
    recomputation(reading)


def _family(reading: Reading, file: str) -> None:
    """The family that has these layers."""
    if "model.name" in reading.settings:
        return
    kind = "llama" if reading.known("gated") or reading.known("positions") == "rope" else "gpt2"
    if "model.num_experts" in reading.settings:
        kind = "mixtral"
        if "model.expert_ffn" in reading.settings:
            reading.settings["model.ffn"] = reading.settings.pop("model.expert_ffn")
    elif reading.known("qk norm"):
        kind = "qwen3"
    elif reading.known("qkv bias") and kind == "llama":
        kind = "qwen2"
    told = [reading.facts[name][1] for name in ("gated", "positions", "qk norm", "qkv bias") if name in reading.facts]
    reading.set("model.family", kind, "; ".join(told) or f"{file} (no key sets another activation)")
    if kind != "gpt2" and reading.known("biases") is True:
        reading.give_up(reading.facts["biases"][1], f"{kind} has no such biases")
