"""Export as Megatron-Bridge's `ConfigContainer`, the YAML that its recipes (NeMo's since 2025) become."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.megatron_lm import LATER, PIPELINES, SHARDED, megatron_cannot
from meshwright.engines.written import WrittenEngine, nested, written
from meshwright.imports.megatron import OPTIMIZERS, SCHEDULES
from meshwright.imports.names import Names
from meshwright.imports.nemo_keys import RULES
from meshwright.imports.rules import dotted
from meshwright.spec.document import write_yaml
from meshwright.spec.precision import BF16, FP16, FP32
from meshwright.spec.run import ResolvedRun, Run

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


KEYS = dotted({
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
    "vocab_size layernorm_epsilon rotary_base init_method_std deterministic_mode tensor_model_parallel_size "
    "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
    "train": "micro_batch_size global_batch_size train_iters",
    "validation": "eval_interval eval_iters",
    "optimizer": "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad",
    "scheduler": "lr_decay_iters lr_warmup_iters",
    "dataset": "seq_length random_seed split reset_position_ids reset_attention_mask eod_mask_loss",
    "tokenizer": "tokenizer_model",
    "checkpoint": "save save_interval most_recent_k",
    "rng": "seed",
})  # fmt: skip
EXPERTS = dotted({"model": "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_aux_loss_coeff"})


class MegatronBridgeConfig(WrittenEngine):
    """Megatron-Bridge's configuration: `ConfigContainer.from_yaml(FILE)`, then `pretrain`."""

    name = "megatron_bridge"
    about = "Megatron-Bridge (NeMo)"
    file = "megatron_bridge.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, MIXED, PIPELINES)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Settings that Megatron lacks; also gpt2's activation and other precisions."""
        refusals, training = megatron_cannot(resolved, self.file), resolved.run.training
        if resolved.model.family == "gpt2":
            refusals["model.family"] = "this export supports SwiGLU, not gpt2's GELU"
        if training.dtypes.narrow and training.reduce_dtype != FP32.name:
            refusals["training.reduce_dtype"] = "this export reduces gradients in fp32"
        return refusals

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
        run, training, layout, model = resolved.run, resolved.run.training, resolved.run.layout, resolved.model
        schedule, sharded, ways = training.lr_schedule, SHARDED.get(layout.zero_stage), layout.virtual_stages
        wsd, replicas = schedule.name == "wsd", layout.dp_replicate if layout.zero_stage else 1
        logs = {name: name in run.tracker_names or None for name in ("tensorboard", "wandb")}
        return write_yaml(nested({
            "_target_": f"{CONFIGS}.ConfigContainer",
            **{f"{part}._target_": target for part, target in TARGETS.items()},
            **written(RULES, [*KEYS, *(EXPERTS if model.num_experts else [])], resolved),
            **{f"model.{key}": value for key, value in _model(resolved).items()},
            "model.virtual_pipeline_model_parallel_size": ways if layout.pp > 1 and ways > 1 else None,
            "dataset.blend": _blend(run),
            "optimizer.optimizer": OPTIMIZERS.write(training.optimizer.name),
            "scheduler.lr_decay_style": SCHEDULES.write(schedule.name),
            "scheduler.lr_wsd_decay_style": "linear" if wsd else None,
            "scheduler.lr_wsd_decay_iters": schedule.decay_steps(training.steps) if wsd else None,
            **{f"{part}.use_distributed_optimizer": layout.zero_stage > 0 for part in ("optimizer", "ddp")},
            "ddp.grad_reduce_in_fp32": True,
            "ddp.num_distributed_optimizer_instances": replicas if replicas > 1 else None,
            "ddp.use_megatron_fsdp": sharded and True,
            "ddp.data_parallel_sharding_strategy": sharded,
            "logger.log_interval": 1,
            "logger.tensorboard_dir": logs["tensorboard"] and f"{run.run_dir}/tensorboard",
            "logger.wandb_project": logs["wandb"] and "meshwright",
            "logger.wandb_exp_name": logs["wandb"] and run.run_dir,
            "tokenizer.tokenizer_type": "HuggingFaceTokenizer",
            "checkpoint.ckpt_format": "fsdp_dtensor" if sharded else "torch_dist",
        }) | {"mixed_precision": MIXED.write(training.precision)})  # fmt: skip


def _model(resolved: ResolvedRun) -> dict[str, Any]:
    """What the sizes of the model leave open, and what is recomputed."""
    model, kinds = resolved.model, set(resolved.recompute)
    full = kinds == {"full"}
    return {
        "should_pad_vocab": False,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm == "heads",
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "rope_scaling": True if model.rope_scaling else None,
        "rope_scaling_factor": model.rope_scaling and model.rope_scaling.factor,
        "sequence_parallel": resolved.run.layout.tp > 1,
        "recompute_granularity": kinds.pop() if kinds in ({"full"}, {"selective"}) else None,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
    }


def _blend(run: Run) -> list[Any]:
    weights = [source.weight for source in run.data.sources]
    return [
        [source.path.removesuffix(".bin") for source in run.data.sources],
        weights if weights[0] is not None else None,
    ]
