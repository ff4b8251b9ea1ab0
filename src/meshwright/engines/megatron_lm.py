"""Export as Megatron-LM's flags: a script that starts `pretrain_gpt.py`."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, assert_never

from meshwright.engines.written import WrittenEngine, rounded, tokenizer_of
from meshwright.imports.megatron import OPTIMIZERS, SCHEDULES
from meshwright.imports.names import Names, pipelined
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import BF16, FP16, FP32
from meshwright.spec.run import ResolvedRun

PRECISIONS = Names.same("training.precision", BF16.name, FP16.name, FP32.name)
PIPELINES = Names.same("layout.schedule", "1f1b", "interleaved-1f1b", counts=pipelined)
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mixtral")
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO's stage -> what Megatron-FSDP shards."""
LATER = "the learning rate starts at 0: every step uses the rate of Meshwright's previous step"
Flags = Iterator[tuple[str, Any]]
"""(flag, value); True for a flag without one."""


def megatron_cannot(resolved: ResolvedRun, where: str) -> dict[str, str]:
    """Settings that no form of Megatron's configuration can express; `where` names the form."""
    run, model, found = resolved.run, resolved.model, dict[str, str]()
    if model.family not in FAMILIES:
        found["model.family"] = f"{where} supports {', '.join(FAMILIES)}"
    if model.rope_scaling is not None and model.rope_scaling.kind != "llama3":
        found["model.rope_scaling"] = "Megatron supports only kind llama3"
    if model.sliding_window is not None:
        found["model.sliding_window"] = f"{where} does not support sliding windows"
    if model.vocab % run.layout.tp:
        found["model.vocab"] = f"layout.tp={run.layout.tp} does not divide {model.vocab} rows"
    if run.model.weights == "pretrained":
        found["model.weights"] = "Megatron loads only checkpoints in its own format; set model.weights=random"
    if bad := [source.path for source in run.data.sources if not source.path.endswith(".bin")]:
        found["data.sources"] = (
            f"Megatron reads token files (NAME.bin with NAME.idx, as in data.cache_dir), not {bad[0]}"
        )
    elif len(run.data.sources) > 1 and run.data.sources[0].weight is None:
        found["data.sources"] = "Megatron mixes sources by weight; give every source a weight"
    if tokenizer_of(resolved) is None:
        found["data.tokenizer"] = "Megatron loads a tokenizer; give its folder"
    return found


PLACE = (
    "# Data and tokenizer are named as in the recipe. Start this script in the recipe's folder, with pretrain_gpt.py's",
    "# full path, or in Megatron-LM's folder, with full paths of data and tokenizer.",
)
"""A comment about the working directory: data and Megatron-LM are in different folders."""


class MegatronLmFlags(WrittenEngine):
    """Megatron-LM's command line."""

    name = "megatron_lm"
    about = "Megatron-LM's pretrain_gpt.py"
    file = "pretrain.sh"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, PIPELINES)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models, data and schedules that Megatron does not have."""
        return megatron_cannot(resolved, self.file)

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, order and fresh weights."""
        return (LATER, "Megatron shuffles samples and draws random weights itself")

    def text(self, resolved: ResolvedRun) -> str:
        """The script."""
        ranks = resolved.run.layout.world_size
        nodes = -(-ranks // 8)
        model = f"{resolved.model.family} of {resolved.model.num_layers} layers, {resolved.run.layout.strategy}"
        start = f"torchrun --nproc-per-node {ranks // nodes} --nnodes {nodes}"
        lines = ["#!/bin/bash", f"# {model}", *PLACE]
        if resolved.run.layout.zero_stage not in SHARDED:  # Megatron-FSDP wants it unset
            lines += ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]
        lines += [f"{start} pretrain_gpt.py \\"]
        for section in (_model, _data, _training, _layout, _saving):
            lines += [f"    {_flag(name, value)} \\" for name, value in section(resolved)]
        return "\n".join(lines)[:-2] + "\n"


def _flag(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    words = value if isinstance(value, list) else [value]
    return f"--{name} {' '.join(shlex.quote(str(word)) for word in words)}"


def _model(resolved: ResolvedRun) -> Flags:
    model = resolved.model
    yield "use-mcore-models", True
    yield "num-layers", model.num_layers
    yield "hidden-size", model.hidden
    yield "ffn-hidden-size", model.ffn
    yield "num-attention-heads", model.num_heads
    if model.head_dim * model.num_heads != model.hidden:
        yield "kv-channels", model.head_dim
    if model.num_kv_heads != model.num_heads:
        yield from (("group-query-attention", True), ("num-query-groups", model.num_kv_heads))
    yield "max-position-embeddings", model.max_positions
    yield from _positions(model)
    if model.rope_scaling is not None:
        yield from (("use-rope-scaling", True), ("rope-scaling-factor", model.rope_scaling.factor))
    yield "normalization", NORMS[model.norm]
    yield "norm-epsilon", model.norm_eps
    yield from _feed_forward(model)
    if model.qkv_bias and model.family != "gpt2":
        yield "add-qkv-bias", True
    if model.qk_norm:
        yield "qk-layernorm", True
    if not model.tied_embeddings:
        yield "untie-embeddings-and-output-weights", True
    if model.num_experts:
        yield from (("num-experts", model.num_experts), ("moe-router-topk", model.experts_per_token))
        yield from (("moe-ffn-hidden-size", model.expert_ffn), ("moe-aux-loss-coeff", model.balance_loss))
    yield "init-method-std", model.init_std
    yield from (("hidden-dropout", 0.0), ("attention-dropout", 0.0))
    yield "padded-vocab-size", model.vocab


NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _positions(model: ModelSpec) -> Flags:
    match model.positions:
        case "rope":
            yield from (("position-embedding-type", "rope"), ("rotary-base", int(model.rope_theta)))
        case "learned":
            yield "position-embedding-type", "learned_absolute"
        case other:
            assert_never(other)


def _feed_forward(model: ModelSpec) -> Flags:
    match model.activation:
        case "silu":
            yield from (("swiglu", True), ("disable-bias-linear", True))
        case "gelu_tanh":
            yield "openai-gelu", True
        case other:
            assert_never(other)


def _data(resolved: ResolvedRun) -> Flags:
    data = resolved.run.data
    yield "seq-length", data.sequence_length
    prefixes = [source.path.removesuffix(".bin") for source in data.sources]
    weights = [source.weight for source in data.sources]
    mixed = [word for pair in zip(weights, prefixes, strict=True) for word in pair]
    yield "data-path", mixed if weights[0] is not None else prefixes
    yield "split", split_of(data.held_out)
    yield from (("tokenizer-type", "HuggingFaceTokenizer"), ("tokenizer-model", tokenizer_of(resolved) or "?"))
    if data.separate_documents:
        yield from ((name, True) for name in ("reset-position-ids", "reset-attention-mask", "eod-mask-loss"))


def split_of(held_out: float) -> str:
    """The shares of training, validation and test."""
    return f"{round(100 * (1 - held_out), 6):g},{round(100 * held_out, 6):g},0"


def _training(resolved: ResolvedRun) -> Flags:
    training = resolved.run.training
    optimizer, schedule = training.optimizer, training.lr_schedule
    yield from (("micro-batch-size", resolved.micro_batch), ("global-batch-size", resolved.global_batch))
    yield "train-iters", training.steps
    yield "optimizer", OPTIMIZERS.write(optimizer.name)
    yield from (("lr", optimizer.lr), ("min-lr", rounded(optimizer.lr * schedule.final)))
    yield "lr-decay-style", SCHEDULES.write(schedule.name)
    if schedule.name == "wsd":
        yield from (("lr-wsd-decay-style", "linear"), ("lr-wsd-decay-iters", schedule.decay_steps(training.steps)))
    yield from (("lr-decay-iters", training.steps), ("lr-warmup-iters", schedule.warmup_steps(training.steps)))
    yield "weight-decay", optimizer.weight_decay
    yield from (("adam-beta1", optimizer.betas[0]), ("adam-beta2", optimizer.betas[1]), ("adam-eps", optimizer.eps))
    yield "clip-grad", training.clip or 0.0
    if (precision := PRECISIONS.write(training.precision)) != FP32.name:
        yield precision, True
        yield (
            ("grad-reduce-in-bf16" if training.reduce_dtype == BF16.name else "accumulate-allreduce-grads-in-fp32"),
            True,
        )
    yield "seed", training.seed
    if training.deterministic:
        yield "deterministic-mode", True
    kinds = set(resolved.recompute)
    if kinds == {"full"}:
        yield from (("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", 1))
    elif kinds == {"selective"}:
        yield "recompute-granularity", "selective"


def _layout(resolved: ResolvedRun) -> Flags:
    layout = resolved.run.layout
    yield "tensor-model-parallel-size", layout.tp
    if layout.tp > 1:
        yield "sequence-parallel", True
    yield "pipeline-model-parallel-size", layout.pp
    if layout.pp > 1 and layout.virtual_stages > 1:
        yield "num-virtual-stages-per-pipeline-rank", layout.virtual_stages
    yield "context-parallel-size", layout.cp
    if layout.ep > 1:
        yield "expert-model-parallel-size", layout.ep
    if layout.zero_stage:
        yield "use-distributed-optimizer", True
    if layout.zero_stage in SHARDED:
        yield from (("use-megatron-fsdp", True), ("data-parallel-sharding-strategy", SHARDED[layout.zero_stage]))
        yield "ckpt-format", "fsdp_dtensor"
    if layout.zero_stage and layout.dp_replicate > 1:
        yield "num-distributed-optimizer-instances", layout.dp_replicate


def _saving(resolved: ResolvedRun) -> Flags:
    run, steps = resolved.run, resolved.run.training.steps
    yield from (("save", run.run_dir), ("save-interval", run.checkpoint.every or steps))
    yield "eval-interval", run.training.evaluation.every or steps
    yield from (("eval-iters", run.training.evaluation.batches), ("log-interval", 1))
    if "tensorboard" in run.trackers:
        yield "tensorboard-dir", f"{run.run_dir}/tensorboard"
    if "wandb" in run.trackers:
        yield from (("wandb-project", "meshwright"), ("wandb-exp-name", run.run_dir))
