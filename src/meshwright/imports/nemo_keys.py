"""The keys of Megatron-Bridge's and NeMo's configurations."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Has, HasNot, NoEffect
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.nemo_adapters import RULES as ADAPTERS
from meshwright.imports.nemo_precision import SECTION, dtypes_of, named, reduced
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import (
    above_zero,
    apply,
    cases,
    choice,
    claims_value,
    either,
    fact,
    flags_of,
    if_any,
    in_turn,
    listed,
    no_effects,
    no_tracker,
    only,
    positive,
    same,
    tracker,
    unsupported,
    when,
    without,
    words,
)
from meshwright.imports.schedules import schedule_choice

SCHEDULES = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupHoldPolicy": "constant"}


def _normalization(reading: Reading, value: Any, origin: str) -> None:
    norms = {"layernorm": "LayerNorm", "low_precision_layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    reading.fact("normalization", norms.get(str(value).lower(), str(value)), origin)


def _optimizer(reading: Reading, value: Any, origin: str) -> None:
    word = str(value)
    if word in ("distributed_fused_adam", "mcore_distributed_optim"):
        reading.fact("zero", 1, origin)
    known = dict.fromkeys(("adam", "adamw", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim"), "adamw")
    apply(words("training.optimizer.name", known | {"muon": "muon"}), reading, value, origin)


def _prefix(reading: Reading, value: Any, origin: str) -> None:
    parts = value if isinstance(value, list) else [value]
    apply(FLAGS["data-path"], reading, " ".join(str(part) for part in parts), origin)


def _blend(reading: Reading, value: Any, origin: str) -> None:
    paths, *weights = value if isinstance(value[0], list) else [value]
    given = (weights or [None])[0] or [None] * len(paths)
    sources = [
        {"path": f"{path}.bin"} | ({} if weight is None else {"weight": float(weight)})
        for path, weight in zip(paths, given, strict=True)
    ]
    reading.set("data.sources", sources, origin)


OF_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings "
    "rotary_base init_method_std moe_router_topk moe_aux_loss_coeff moe_ffn_hidden_size tensor_model_parallel_size "
    "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size sequence_parallel "
    "rope_scaling_factor deterministic_mode recompute_granularity recompute_method recompute_num_layers "
    "hidden_dropout attention_dropout"
)
OTHER_NAMES = {
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "rope_scaling": "use-rope-scaling",
    **{f"activations_checkpoint_{name}": f"recompute-{name.replace('_', '-')}"
       for name in ("granularity", "method", "num_layers")},
}  # fmt: skip
MODELS = ("model", "trainer.strategy")
STATES = {
    **flags_of({
        **dict.fromkeys(MODELS, OF_MODEL),
        "model": f"{OF_MODEL} vocab_size seq_length normalization position_embedding_type make_vocab_size_divisible_by "
        "seed micro_batch_size global_batch_size attention_softmax_in_fp32",
        "model.data": "seq_length reset_attention_mask reset_position_ids",
        "train": "micro_batch_size global_batch_size train_iters train_samples rampup_batch_size eval_interval "
        "eval_iters",
        "validation": "eval_interval eval_iters",
        "optimizer": "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 fp16",
        "scheduler": "lr_decay_style lr_warmup_iters lr_warmup_fraction lr_decay_iters lr_wsd_decay_iters "
        "lr_warmup_samples lr_decay_samples lr_wsd_decay_samples lr_wsd_decay_style",
        "ddp": "data_parallel_sharding_strategy num_distributed_optimizer_instances",
        "dataset": "seq_length eod_mask_loss dataloader_type split reset_attention_mask reset_position_ids",
        "checkpoint": "save save_interval load",
        "tokenizer": "tokenizer_model tokenizer_type",
        "rng": "seed",
        "logger": "tensorboard_dir wandb_project",
    }),
    **{f"{part}.{key}": flag for part in MODELS for key, flag in OTHER_NAMES.items()},
    "model.share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "model.add_bias_linear": "disable-bias-linear",
    "model.bias": "disable-bias-linear",
}  # fmt: skip
"""Key -> Megatron-LM's flag about the same, whose rule it has unless another is below."""
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.CLASS: {
        "": "_target_ name",
        "model": "_target_ activation_func._call_ megatron_amp_O2 mcore_gpt",
        **dict.fromkeys(("train", "ddp", "dataset", "optimizer", "scheduler", "logger", "checkpoint", "tokenizer",
                         "validation", "rng", "dist"), "_target_"),
    },
    NoEffect.KERNEL: {
        "model": "apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion "
        "gradient_accumulation_fusion transformer_impl cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "persist_layer_norm attention_backend transformer_engine bias_dropout_add_fusion moe_grouped_gemm "
        "moe_permute_fusion apply_query_key_layer_scaling",
        "dataset": "skip_getting_attention_mask_from_dataset",
    },
    NoEffect.OVERLAP: {
        "model": "moe_token_dispatcher_type",
        "ddp": "overlap_grad_reduce overlap_param_gather average_in_collective bucket_size",
        "optimizer": "overlap_param_gather_with_optimizer_step barrier_with_L1_time",
    },
    NoEffect.MEMORY: {
        "model": "deallocate_pipeline_outputs",
        "train": "manual_gc manual_gc_interval manual_gc_eval",
    },
    NoEffect.DRAWS: {"model": "use_cpu_initialization", "rng": "te_rng_tracker"},
    NoEffect.READS: {"dataset": "num_workers data_sharding pin_memory persistent_workers"},
    NoEffect.CACHE: {"dataset": "path_to_cache"},
    NoEffect.LOGS: {
        "train": "log_interval",
        "logger": "log_interval log_throughput wandb_exp_name wandb_entity log_timers_to_tensorboard",
    },
    NoEffect.GUARDS: {"train": "exit_signal_handler", "ddp": "check_for_nan_in_grad",
                      "dist": "distributed_timeout_minutes"},
    NoEffect.LAUNCH: {"dist": "distributed_backend use_gloo_process_groups"},
    NoEffect.SAVES: {"checkpoint": "ckpt_format fully_parallel_save async_save save_optim save_rng"},
    NoEffect.RESUMES: {"scheduler": "override_opt_param_scheduler"},
}  # fmt: skip
FUNCTION = cases(
    {word: fact("activation", word) for word in ("silu", "gelu")},
    word=lambda value: next((word for word in ("silu", "gelu") if word in str(value)), ""),
)
"""Of Megatron-Bridge; another key says whether layers are gated."""
RULES: Mapping[str, Rule] = {
    **same(FLAGS, STATES),
    "model.encoder_seq_length": "data.sequence_length",
    "model.gated_linear_unit": when(fact("swiglu"), True, Has("model.family", "gpt2")),
    "model.activation": cases(  # which says whether layers are gated, too
        {
            ("swiglu", "fast-swiglu", "silu", "fast-silu"): fact("swiglu", True),
            ("gelu", "openai-gelu"): Has("model.family", "gpt2"),
        },
        "supported: swiglu, gelu",
        str,
    ),
    "model.activation_func": FUNCTION,
    "model.activation_func._target_": FUNCTION,
    "model.add_bias_linear": fact("biases"),
    "model.bias": fact("biases"),
    "model.add_qkv_bias": if_any(fact("qkv bias"), True, HasNot("model.family", "qwen2")),
    "model.position_embedding_type": choice(
        fact("positions"), {"rope": "rope", "learned_absolute": "learned_absolute"}
    ),
    "model.normalization": _normalization,
    "trainer.strategy.normalization": _normalization,
    "model.share_embeddings_and_output_weights": either("model.tied_embeddings", True, False),
    "model.rotary_percentage": only(1, "rope always rotates the whole head"),
    "model.rotary_percent": only(1, "rope always rotates the whole head"),
    "model.qk_layernorm": if_any(fact("qk norm"), True, HasNot("model.family", "qwen3")),
    "model.precision": named,
    "model.optim.name": _optimizer,
    "model.optim.lr": "training.optimizer.lr",
    "model.optim.weight_decay": "training.optimizer.weight_decay",
    "model.optim.betas": listed("training.optimizer.betas"),
    "model.optim.eps": "training.optimizer.eps",
    "model.optim.sched.name": schedule_choice(SCHEDULES),
    "model.optim.sched.warmup_steps": "training.lr_schedule.warmup",
    "model.optim.sched.warmup_ratio": fact("warmup_ratio"),
    "model.optim.sched.constant_steps": unsupported("a cosine always decays until the last step"),
    "model.optim.sched.min_lr": fact("min_lr"),
    "model.data.data_prefix": _prefix,
    "model.data.splits_string": FLAGS["split"],
    "model.tokenizer.model": "data.tokenizer",
    "model.tokenizer.type": "data.tokenizer",
    "trainer.devices": fact("ranks of a node"),
    "trainer.num_nodes": fact("nodes"),
    "trainer.precision": named,
    "trainer.max_steps": "training.steps",
    "trainer.gradient_clip_val": positive("training.clip"),
    "trainer.val_check_interval": cases(
        {float: without("a share of an epoch; set training.evaluation.every, in steps")},
        in_turn("training.evaluation.every"),
        type,
    ),
    "trainer.limit_val_batches": "training.evaluation.batches",
    "trainer.accumulate_grad_batches": only(1, "the global batch tells the accumulation"),
    "exp_manager.explicit_log_dir": "run_dir",
    "exp_manager.create_wandb_logger": when(tracker("wandb"), True, no_tracker("wandb")),
    "exp_manager.checkpoint_callback_params.save_top_k": "checkpoint.keep_last",
    "train.num_epochs": fact("epochs"),
    "optimizer.optimizer": _optimizer,
    "optimizer.use_distributed_optimizer": when(fact("distributed optimizer"), 1, HasNot("layout.zero", 1)),
    "optimizer.use_precision_aware_optimizer": unsupported(
        "set training.optimizer.name=adamw_8bit for one byte per moment"
    ),
    "optimizer.optimizer_cpu_offload": unsupported("set layout.offload={optimizer: host}"),
    "scheduler.max_steps": fact("decay steps"),
    "scheduler.lr_warmup_init": only(0, "warm-up always starts at 0"),
    "scheduler.weight_decay_incr_style": only("constant", "weight decay is constant"),
    **{f"scheduler.{end}_weight_decay": claims_value("training.optimizer.weight_decay") for end in ("start", "end")},
    "ddp.use_distributed_optimizer": when(fact("distributed optimizer"), 1, HasNot("layout.zero", 1)),
    **dict.fromkeys(
        ("ddp.use_megatron_fsdp", "ddp.use_custom_fsdp"), when(fact("Megatron-FSDP"), True, HasNot("layout.zero", 3))
    ),
    "ddp.grad_reduce_in_fp32": reduced,
    "dataset.sequence_length": "data.sequence_length",
    "dataset.random_seed": claims_value("training.seed"),
    "dataset.blend": _blend,
    "dataset.data_path": _prefix,
    "dataset.mock": unsupported("set data.sources (default: the Python standard library's text)"),
    "checkpoint.most_recent_k": above_zero("checkpoint.keep_last", Has("checkpoint.keep_last", None)),
    "checkpoint.pretrained_checkpoint": without(
        "export the checkpoint to Hugging Face's format, and set model.name to its folder"
    ),
    "model.should_pad_vocab": unsupported("set model.vocab to the padded number of rows"),
    "model.fp16_lm_head": unsupported("the head computes in training.precision"),
    "model.bias_gelu_fusion": fact("fused GELU"),
    **dtypes_of("model"),
    **ADAPTERS,
    **no_effects(NO_EFFECT),
}
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
