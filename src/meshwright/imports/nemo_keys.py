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
    if_any,
    in_turn,
    listed,
    no_effects,
    no_tracker,
    only,
    positive,
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
    **{f"{part}.{key}": FLAGS[flag] for part in ("model", "trainer.strategy") for key, flag in SIZES.items()},
    "model.vocab_size": "model.vocab",
    "model.seq_length": "data.sequence_length",
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
    "model.seed": "training.seed",
    "model.micro_batch_size": "training.micro_batch",
    "model.global_batch_size": "training.global_batch",
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
    "model.data.seq_length": "data.sequence_length",
    "model.data.reset_attention_mask": FLAGS["reset-attention-mask"],
    "model.data.reset_position_ids": FLAGS["reset-position-ids"],
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
    "train.micro_batch_size": "training.micro_batch",
    "train.global_batch_size": "training.global_batch",
    "train.train_iters": "training.steps",
    "train.train_samples": fact("samples"),
    "train.num_epochs": fact("epochs"),
    "train.rampup_batch_size": FLAGS["rampup-batch-size"],
    "train.eval_interval": FLAGS["eval-interval"],
    "train.eval_iters": "training.evaluation.batches",
    "validation.eval_interval": FLAGS["eval-interval"],
    "validation.eval_iters": "training.evaluation.batches",
    "optimizer.optimizer": _optimizer,
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.min_lr": fact("min_lr"),
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "optimizer.adam_beta1": fact("beta1"),
    "optimizer.adam_beta2": fact("beta2"),
    "optimizer.adam_eps": "training.optimizer.eps",
    "optimizer.clip_grad": positive("training.clip"),
    "optimizer.bf16": when("training.precision", "bf16"),
    "optimizer.fp16": when("training.precision", "fp16"),
    "optimizer.use_distributed_optimizer": when(fact("distributed optimizer"), 1, HasNot("layout.zero", 1)),
    "optimizer.use_precision_aware_optimizer": unsupported(
        "set training.optimizer.name=adamw_8bit for one byte per moment"
    ),
    "optimizer.optimizer_cpu_offload": unsupported("set layout.offload={optimizer: host}"),
    "scheduler.lr_decay_style": FLAGS["lr-decay-style"],
    "scheduler.lr_warmup_iters": "training.lr_schedule.warmup",
    "scheduler.lr_warmup_fraction": fact("warmup_ratio"),
    "scheduler.lr_decay_iters": fact("decay steps"),
    "scheduler.max_steps": fact("decay steps"),
    "scheduler.lr_wsd_decay_iters": "training.lr_schedule.decay",
    "scheduler.lr_warmup_samples": FLAGS["lr-warmup-samples"],
    "scheduler.lr_decay_samples": FLAGS["lr-decay-samples"],
    "scheduler.lr_wsd_decay_samples": FLAGS["lr-wsd-decay-samples"],
    "scheduler.lr_wsd_decay_style": FLAGS["lr-wsd-decay-style"],
    "scheduler.lr_warmup_init": only(0, "warm-up always starts at 0"),
    "scheduler.weight_decay_incr_style": only("constant", "weight decay is constant"),
    **{f"scheduler.{end}_weight_decay": claims_value("training.optimizer.weight_decay") for end in ("start", "end")},
    "ddp.use_distributed_optimizer": when(fact("distributed optimizer"), 1, HasNot("layout.zero", 1)),
    **dict.fromkeys(
        ("ddp.use_megatron_fsdp", "ddp.use_custom_fsdp"), when(fact("Megatron-FSDP"), True, HasNot("layout.zero", 3))
    ),
    "ddp.data_parallel_sharding_strategy": FLAGS["data-parallel-sharding-strategy"],
    "ddp.grad_reduce_in_fp32": reduced,
    "ddp.num_distributed_optimizer_instances": fact("instances"),
    "dataset.sequence_length": "data.sequence_length",
    "dataset.seq_length": "data.sequence_length",
    "dataset.random_seed": claims_value("training.seed"),
    "dataset.eod_mask_loss": FLAGS["eod-mask-loss"],
    "dataset.dataloader_type": FLAGS["dataloader-type"],
    "dataset.blend": _blend,
    "dataset.data_path": _prefix,
    "dataset.split": FLAGS["split"],
    "dataset.reset_attention_mask": FLAGS["reset-attention-mask"],
    "dataset.reset_position_ids": FLAGS["reset-position-ids"],
    "dataset.mock": unsupported("set data.sources (default: the Python standard library's text)"),
    "checkpoint.save": "run_dir",
    "checkpoint.save_interval": FLAGS["save-interval"],
    "checkpoint.most_recent_k": above_zero("checkpoint.keep_last", Has("checkpoint.keep_last", None)),
    "checkpoint.load": FLAGS["load"],
    "checkpoint.pretrained_checkpoint": without(
        "export the checkpoint to Hugging Face's format, and set model.name to its folder"
    ),
    "tokenizer.tokenizer_model": "data.tokenizer",
    "rng.seed": "training.seed",
    "logger.tensorboard_dir": FLAGS["tensorboard-dir"],
    "logger.wandb_project": FLAGS["wandb-project"],
    "model.make_vocab_size_divisible_by": FLAGS["make-vocab-size-divisible-by"],
    "model.should_pad_vocab": unsupported("set model.vocab to the padded number of rows"),
    "model.fp16_lm_head": unsupported("the head computes in training.precision"),
    "model.attention_softmax_in_fp32": FLAGS["attention-softmax-in-fp32"],
    "model.bias_gelu_fusion": fact("fused GELU"),
    **dtypes_of("model"),
    "tokenizer.tokenizer_type": FLAGS["tokenizer-type"],
    **ADAPTERS,
    **no_effects(NO_EFFECT),
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
