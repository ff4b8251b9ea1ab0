"""Export as Megatron-Bridge's `ConfigContainer`, the YAML that its recipes (NeMo's since 2025) become."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.megatron_lm import LATER, PIPELINES, flags_of_run, megatron_cannot
from meshwright.engines.written import WrittenEngine, nested, written
from meshwright.imports.megatron import OPTIMIZERS
from meshwright.imports.names import SCHEDULES, Names
from meshwright.imports.nemo_keys import RULES
from meshwright.imports.rules import dotted, flags_of
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
FLAGS = flags_of({
    "model": "normalization add_qkv_bias qk_layernorm position_embedding_type hidden_dropout attention_dropout "
    "rope_scaling_factor sequence_parallel recompute_granularity recompute_method recompute_num_layers",
    "scheduler": "lr_decay_style lr_wsd_decay_style lr_wsd_decay_iters",
    "ddp": "use_distributed_optimizer num_distributed_optimizer_instances data_parallel_sharding_strategy",
    "logger": "log_interval tensorboard_dir wandb_project wandb_exp_name",
    "tokenizer": "tokenizer_type",
}) | {
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "optimizer.optimizer": "optimizer",
}  # fmt: skip
"""Key -> the flag of Megatron-LM that has the same value."""
WHERE_ON = {"model.rope_scaling": "use-rope-scaling", "ddp.use_megatron_fsdp": "use-megatron-fsdp"}
"""The same of keys that are left out where the flag is."""
FIXED = {
    "model.should_pad_vocab": False,
    "model.gated_linear_unit": True,
    "model.activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "model.add_bias_linear": False,
    "ddp.grad_reduce_in_fp32": True,
}
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
        flags, model, training = flags_of_run(resolved), resolved.model, resolved.run.training
        return write_yaml(nested({
            "_target_": f"{CONFIGS}.ConfigContainer",
            **{f"{part}._target_": target for part, target in TARGETS.items()},
            **written(RULES, [*KEYS, *(EXPERTS if model.num_experts else [])], resolved),
            **{key: flags[flag] for key, flag in FLAGS.items()},
            **{key: flags[flag] or None for key, flag in WHERE_ON.items()},
            **FIXED,
            "model.share_embeddings_and_output_weights": model.tied_embeddings,
            "dataset.blend": _blend(resolved.run),
            "optimizer.use_distributed_optimizer": flags["use-distributed-optimizer"],
            "checkpoint.ckpt_format": flags["ckpt-format"] or "torch_dist",
        }) | {"mixed_precision": MIXED.write(training.precision)})  # fmt: skip


def _blend(run: Run) -> list[Any]:
    weights = [source.weight for source in run.data.sources]
    return [
        [source.path.removesuffix(".bin") for source in run.data.sources],
        weights if weights[0] is not None else None,
    ]
