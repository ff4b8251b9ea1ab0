"""Export as Megatron-LM's flags: a script that starts `pretrain_gpt.py`."""

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, assert_never

from meshwright.engines.written import WrittenEngine, fully, refused_tokenizer, unless, written
from meshwright.imports.megatron import OPTIMIZERS, RULES, STAGES
from meshwright.imports.names import SCHEDULES, Names, pipelined
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import BF16, FP16, FP32
from meshwright.spec.run import ResolvedRun

PRECISIONS = Names.same("training.precision", BF16.name, FP16.name, FP32.name)
PIPELINES = Names.same("layout.schedule", "1f1b", "interleaved-1f1b", counts=pipelined)
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mixtral")
SHARDED = {stage: name for name, stage in STAGES.items() if stage > 1}
"""ZeRO's stage -> what Megatron-FSDP shards."""
LATER = "the learning rate starts at 0: every step uses the rate of Meshwright's previous step"
Flags = dict[str, Any]
"""Flag -> value: True for a flag without one, False or None where it is left out."""
SIZES = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads max-position-embeddings norm-epsilon init-method-std "
    "padded-vocab-size untie-embeddings-and-output-weights"
)
EXPERTS = "num-experts moe-router-topk moe-ffn-hidden-size moe-aux-loss-coeff"
DATA = "seq-length split tokenizer-model reset-position-ids reset-attention-mask eod-mask-loss"
TRAINING = (
    "micro-batch-size global-batch-size train-iters optimizer lr min-lr lr-decay-iters lr-warmup-iters weight-decay "
    "adam-beta1 adam-beta2 adam-eps clip-grad bf16 fp16 seed deterministic-mode"
)
LAYOUT = "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size"
SAVING = "save save-interval eval-interval eval-iters"


def megatron_cannot(resolved: ResolvedRun, where: str) -> dict[str, str]:
    """Settings that no form of Megatron's configuration can express; `where` names the form."""
    run, model, refusals = resolved.run, resolved.model, dict[str, str]()
    if model.family not in FAMILIES:
        refusals["model.family"] = f"{where} supports {', '.join(FAMILIES)}"
    if model.rope_scaling is not None and model.rope_scaling.kind != "llama3":
        refusals["model.rope_scaling"] = "Megatron supports only kind llama3"
    if model.sliding_window is not None:
        refusals["model.sliding_window"] = f"{where} does not support sliding windows"
    if model.vocab % run.layout.tp:
        refusals["model.vocab"] = f"layout.tp={run.layout.tp} does not divide {model.vocab} rows"
    if run.model.weights == "pretrained":
        refusals["model.weights"] = "Megatron loads only checkpoints in its own format; set model.weights=random"
    if bad := [source.path for source in run.data.sources if not source.path.endswith(".bin")]:
        refusals["data.sources"] = (
            f"Megatron reads token files (NAME.bin with NAME.idx, as in data.cache_dir), not {bad[0]}"
        )
    elif len(run.data.sources) > 1 and run.data.sources[0].weight is None:
        refusals["data.sources"] = "Megatron mixes sources by weight; give every source a weight"
    return refusals | refused_tokenizer(resolved, "Megatron")


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
        flags = flags_of_run(resolved).items()
        lines += [f"    {_flag(name, value)} \\" for name, value in flags if value is not None and value is not False]
        return "\n".join(lines)[:-2] + "\n"


def _flag(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    words = value if isinstance(value, list) else [value]
    return f"--{name} {' '.join(shlex.quote(str(word)) for word in words)}"


def flags_of_run(resolved: ResolvedRun) -> Flags:
    """Every flag of a run, those that are left out, too."""
    sections = (_model, _data, _training, _layout, _saving)
    return {flag: value for section in sections for flag, value in section(resolved).items()}


def _model(resolved: ResolvedRun) -> Flags:
    model = resolved.model
    grouped, scaling = model.num_kv_heads != model.num_heads, model.rope_scaling
    return {
        "use-mcore-models": True,
        **written(RULES, [*SIZES.split(), *(EXPERTS.split() if model.num_experts else [])], resolved),
        "kv-channels": model.head_dim if model.head_dim * model.num_heads != model.hidden else None,
        "group-query-attention": grouped,
        "num-query-groups": model.num_kv_heads if grouped else None,
        **_layers(model),
        "use-rope-scaling": scaling is not None,
        "rope-scaling-factor": scaling and scaling.factor,
        "normalization": NORMS[model.norm],
        "add-qkv-bias": model.qkv_bias and model.family != "gpt2",
        "qk-layernorm": model.qk_norm == "heads",
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
    }


NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _layers(model: ModelSpec) -> Flags:
    """The flags of positions and of feed-forward layers."""
    match model.positions:
        case "rope":
            flags: Flags = {"position-embedding-type": "rope", "rotary-base": int(model.rope_theta)}
        case "learned":
            flags = {"position-embedding-type": "learned_absolute"}
        case other:
            assert_never(other)
    match model.activation:
        case "silu":
            return flags | {"swiglu": True, "disable-bias-linear": True}
        case "gelu_tanh":
            return flags | {"openai-gelu": True}
        case "clamped_silu":
            raise AssertionError(f"{model.family} is refused")
        case other:
            assert_never(other)


def _data(resolved: ResolvedRun) -> Flags:
    sources = resolved.run.data.sources
    mixed = [
        word for source in sources for word in (source.weight, source.path.removesuffix(".bin")) if word is not None
    ]
    return {"data-path": mixed, "tokenizer-type": "HuggingFaceTokenizer", **written(RULES, DATA.split(), resolved)}


def _training(resolved: ResolvedRun) -> Flags:
    training = resolved.run.training
    schedule, kinds, narrow = training.lr_schedule, set(resolved.recompute), training.reduce_dtype == BF16.name
    mixed, wsd, full = training.precision != FP32.name, schedule.name == "wsd", fully(resolved)
    return {
        **written(RULES, TRAINING.split(), resolved),
        "lr-decay-style": SCHEDULES.write(schedule.name),
        "lr-wsd-decay-style": "linear" if wsd else None,
        "lr-wsd-decay-iters": schedule.decay_steps(training.steps) if wsd else None,
        "grad-reduce-in-bf16": mixed and narrow,
        "accumulate-allreduce-grads-in-fp32": mixed and not narrow,
        "recompute-granularity": kinds.pop() if kinds in ({"full"}, {"selective"}) else None,
        "recompute-method": "uniform" if full else None,
        "recompute-num-layers": 1 if full else None,
    }


def _layout(resolved: ResolvedRun) -> Flags:
    layout, ways = resolved.run.layout, resolved.run.layout.virtual_stages
    sharded = SHARDED.get(layout.zero_stage)
    return {
        **written(RULES, LAYOUT.split(), resolved),
        "sequence-parallel": layout.tp > 1,
        "num-virtual-stages-per-pipeline-rank": unless(ways, 1) if layout.pp > 1 else None,
        "expert-model-parallel-size": unless(layout.ep, 1),
        "use-distributed-optimizer": layout.zero_stage > 0,
        "use-megatron-fsdp": sharded is not None,
        "data-parallel-sharding-strategy": sharded,
        "ckpt-format": sharded and "fsdp_dtensor",
        "num-distributed-optimizer-instances": unless(layout.dp_replicate, 1) if layout.zero_stage else None,
    }


def _saving(resolved: ResolvedRun) -> Flags:
    run, names = resolved.run, "wandb" in resolved.run.tracker_names
    return {
        **written(RULES, SAVING.split(), resolved),
        "log-interval": 1,
        "tensorboard-dir": f"{run.run_dir}/tensorboard" if "tensorboard" in run.tracker_names else None,
        "wandb-project": "meshwright" if names else None,
        "wandb-exp-name": run.run_dir if names else None,
    }
