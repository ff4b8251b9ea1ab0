"""Export as Megatron-Bridge's `ConfigContainer`, the YAML that its recipes (NeMo's since 2025) become."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.megatron_lm import LATER, PIPELINES, SHARDED, megatron_cannot, split_of
from meshwright.engines.written import WrittenEngine, rounded, tokenizer_of
from meshwright.imports.megatron import OPTIMIZERS, SCHEDULES
from meshwright.imports.names import Names
from meshwright.spec.document import write_yaml
from meshwright.spec.precision import BF16, FP16, FP32
from meshwright.spec.run import ResolvedRun

CONFIGS = "megatron.bridge.training.config"
TARGETS = {
    "model": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "train": f"{CONFIGS}.TrainingConfig",
    "validation": f"{CONFIGS}.ValidationConfig",
    "optimizer": f"{CONFIGS}.OptimizerConfig",
    "scheduler": f"{CONFIGS}.SchedulerConfig",
    "ddp": f"{CONFIGS}.DistributedDataParallelConfig",
    "dataset": f"{CONFIGS}.GPTDatasetConfig",
    "logger": f"{CONFIGS}.LoggerConfig",
    "tokenizer": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
    "checkpoint": f"{CONFIGS}.CheckpointConfig",
    "rng": f"{CONFIGS}.RNGConfig",
}
"""The class of every section."""
HALF = {"_target_": "torch.float16", "_call_": False}
MIXED = Names("training.precision", {
    BF16.name: "bf16_mixed",
    FP16.name: {  # its recipe fp16_mixed reduces gradients in fp16
        "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
        FP16.name: True,
        "params_dtype": HALF,
        "pipeline_dtype": HALF,
        "grad_reduce_in_fp32": True,
    },
    FP32.name: None,
})  # fmt: skip
"""`mixed_precision` by our precision."""


class MegatronBridgeConfig(WrittenEngine):
    """Megatron-Bridge's configuration: `ConfigContainer.from_yaml(FILE)`, then `pretrain`."""

    name = "megatron_bridge"
    about = "Megatron-Bridge (NeMo)"
    file = "megatron_bridge.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, MIXED, PIPELINES)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Settings that Megatron lacks; also gpt2's activation and other precisions."""
        found, training = megatron_cannot(resolved, self.file), resolved.run.training
        if resolved.model.family == "gpt2":
            found["model.family"] = "this export supports SwiGLU, not gpt2's GELU"
        if training.dtypes.narrow and training.reduce_dtype != FP32.name:
            found["training.reduce_dtype"] = "this export reduces gradients in fp32"
        return found

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, order and fresh weights, and how it is started."""
        ranks = resolved.run.layout.world_size
        return (
            f"the file does not contain the number of ranks; start {ranks}, and import it with --ranks {ranks}",
            LATER,
            "Megatron shuffles samples and draws random weights itself",
        )

    def text(self, resolved: ResolvedRun) -> str:
        """The YAML."""
        made = {"model": {**_sizes(resolved), **_degrees(resolved)}, **_sections(resolved)}
        found = {part: {"_target_": TARGETS[part], **values} for part, values in made.items()}
        mixed = {"mixed_precision": MIXED.write(resolved.run.training.precision)}
        return write_yaml({"_target_": f"{CONFIGS}.ConfigContainer", **found, **mixed})


def _sizes(resolved: ResolvedRun) -> dict[str, Any]:
    model = resolved.model
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "seq_length": resolved.run.data.sequence_length,
        "vocab_size": model.vocab,
        "should_pad_vocab": False,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "position_embedding_type": "rope",
        "rotary_base": model.rope_theta,
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "init_method_std": model.init_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "deterministic_mode": resolved.run.training.deterministic,
    }
    if model.rope_scaling is not None:
        found |= {"rope_scaling": True, "rope_scaling_factor": model.rope_scaling.factor}
    if model.num_experts:
        found |= {"num_moe_experts": model.num_experts, "moe_router_topk": model.experts_per_token}
        found |= {"moe_ffn_hidden_size": model.expert_ffn, "moe_aux_loss_coeff": model.balance_loss}
    return found


def _degrees(resolved: ResolvedRun) -> dict[str, Any]:
    layout, kinds = resolved.run.layout, set(resolved.recompute)
    found: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
    }
    if layout.pp > 1 and layout.virtual_stages > 1:
        found["virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    if kinds == {"full"}:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif kinds == {"selective"}:
        found["recompute_granularity"] = "selective"
    return found


def _sections(resolved: ResolvedRun) -> dict[str, dict[str, Any]]:
    run, training, layout = resolved.run, resolved.run.training, resolved.run.layout
    optimizer, schedule, steps = training.optimizer, training.lr_schedule, training.steps
    wsd = {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": schedule.decay_steps(steps)}
    data, weights = run.data, [source.weight for source in run.data.sources]
    sharded = layout.zero_stage > 0
    fsdp = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": SHARDED.get(layout.zero_stage)}
    replicas = layout.dp_replicate if sharded else 1
    return {
        "train": {"micro_batch_size": resolved.micro_batch, "global_batch_size": resolved.global_batch,
                  "train_iters": steps},
        "validation": {"eval_interval": training.evaluation.every or steps, "eval_iters": training.evaluation.batches},
        "optimizer": {
            "optimizer": OPTIMIZERS.write(optimizer.name),
            "lr": optimizer.lr,
            "min_lr": rounded(optimizer.lr * schedule.final),
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_eps": optimizer.eps,
            "clip_grad": training.clip or 0.0,
            "use_distributed_optimizer": sharded,
        },
        "scheduler": {
            "lr_decay_style": SCHEDULES.write(schedule.name),
            **(wsd if schedule.name == "wsd" else {}),
            "lr_decay_iters": steps,
            "lr_warmup_iters": schedule.warmup_steps(steps),
        },
        "ddp": {
            "use_distributed_optimizer": sharded,
            "grad_reduce_in_fp32": True,
            **({"num_distributed_optimizer_instances": replicas} if replicas > 1 else {}),
            **(fsdp if layout.zero_stage in SHARDED else {}),
        },
        "dataset": {
            "seq_length": data.sequence_length,
            "random_seed": training.seed,
            "blend": [[source.path.removesuffix(".bin") for source in data.sources],
                      weights if weights[0] is not None else None],
            "split": split_of(data.held_out),
            **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), data.separate_documents),
        },
        "logger": {
            "log_interval": 1,
            **({"tensorboard_dir": f"{run.run_dir}/tensorboard"} if "tensorboard" in run.trackers else {}),
            **({"wandb_project": "meshwright", "wandb_exp_name": run.run_dir} if "wandb" in run.trackers else {}),
        },
        "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer_of(resolved)},
        "checkpoint": {
            "save": run.run_dir,
            "save_interval": run.checkpoint.every or steps,
            "most_recent_k": run.checkpoint.keep_last,
            "ckpt_format": "fsdp_dtensor" if layout.zero_stage in SHARDED else "torch_dist",
        },
        "rng": {"seed": training.seed},
    }  # fmt: skip
