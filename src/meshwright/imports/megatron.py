"""Megatron-LM's command line, from a shell script or a file of flags."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from meshwright.imports.claims import Has, HasNot, NoEffect
from meshwright.imports.megatron_combined import LISTS, SWITCHES, MegatronForm, combine, model_defaults
from meshwright.imports.megatron_combined import RULES as COMBINED_RULES
from meshwright.imports.names import SCHEDULES, Names
from meshwright.imports.reading import Get, Reading, Rule, check_count, check_number, joined
from meshwright.imports.rules import (
    always,
    both,
    cases,
    choice,
    claims_value,
    fact,
    if_any,
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
from meshwright.imports.schedules import schedule_words
from meshwright.imports.shell import take_flags
from meshwright.spec.errors import UserError

DEFAULTS: Mapping[str, Any] = {
    "training.optimizer.betas": [0.9, 0.999],
    "training.optimizer.weight_decay": 0.01,
    "training.precision": "fp32",
    "training.seed": 1234,
    "training.lr_schedule.final": 0.0,
    "training.lr_schedule.warmup": 0,
}
"""Megatron's defaults that do not depend on other settings."""
NO_EFFECT: Mapping[NoEffect, str] = {
    NoEffect.OVERLAP: "overlap-grad-reduce overlap-param-gather cp-comm-type moe-token-dispatcher-type tp-comm-overlap "
    "no-async-tensor-model-parallel-allreduce moe-shared-expert-overlap overlap-param-gather-with-optimizer-step "
    "overlap-moe-expert-parallel-comm tp-comm-overlap-cfg",
    NoEffect.KERNEL: "use-flash-attn transformer-impl use-mcore-models no-masked-softmax-fusion no-rope-fusion "
    "no-gradient-accumulation-fusion no-bias-swiglu-fusion moe-grouped-gemm moe-permute-fusion attention-backend "
    "no-bias-dropout-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl",
    NoEffect.MEMORY: "sequence-parallel manual-gc manual-gc-interval manual-gc-eval distribute-saved-activations "
    "empty-unused-memory-level moe-layer-recompute",
    NoEffect.LOGS: "log-interval log-throughput wandb-exp-name wandb-entity wandb-save-dir log-params-norm "
    "log-num-zeros-in-grad log-memory-to-tensorboard log-timers-to-tensorboard log-validation-ppl-to-tensorboard "
    "log-progress timing-log-level timing-log-option tensorboard-queue-size tensorboard-log-interval "
    "log-world-size-to-tensorboard log-straggler log-energy",
    NoEffect.READS: "num-workers no-create-attention-mask-in-dataloader no-mmap-bin-files num-dataset-builder-threads",
    NoEffect.CACHE: "data-cache-path",
    NoEffect.LAUNCH: "distributed-backend node_rank node-rank master_addr master_port rdzv_backend rdzv-backend "
    "rdzv_endpoint rdzv-endpoint rdzv_id rdzv-id local-ranks-filter",
    NoEffect.GUARDS: "distributed-timeout-minutes exit-signal-handler "
    "no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-weight-hash-across-dp-replicas-interval "
    "disable-straggler-on-startup straggler-minmax-count",
    NoEffect.SAVES: "async-save ckpt-format dist-ckpt-format use-dist-ckpt no-save-optim no-save-rng "
    "ckpt-fully-parallel-save ckpt-assume-constant-structure auto-detect-ckpt-format use-persistent-ckpt-worker "
    "dist-ckpt-optim-fully-reshardable",
    NoEffect.RESUMES: "no-load-optim no-load-rng finetune exit-on-missing-checkpoint ckpt-fully-parallel-load "
    "ckpt-step override-opt_param-scheduler use-checkpoint-opt_param-scheduler dist-ckpt-strictness",
    NoEffect.TOKENIZER: "tokenizer-hf-use-fast",
    NoEffect.CODE: "trust-remote-code",
}
"""Why flags have no effect -> the flags."""
OPTIMIZERS = Names("training.optimizer.name", {"adamw": "adam"}, {"muon": "muon"})
UNSET = re.compile(r"\$[\w{(@*]|`")
"""What only a shell could replace."""
OF_OTHER_MODELS = (
    *("hybrid-layer-pattern", "hybrid-override-pattern", "hybrid-attention-ratio", "is-hybrid-model", "mask-prob"),
    *("encoder-num-layers", "decoder-num-layers", "encoder-seq-length", "decoder-seq-length", "short-seq-prob"),
    *("bert-no-binary-head", "bert-load", "vocab-extra-ids", "language-model-type", "vision-model-type", "img-h"),
)
OTHER = "it trains another model than GPT; only the flags are imported"
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What Megatron-FSDP shards."""


TOKENIZER = "set data.tokenizer to the tokenizer's folder"


def _data(reading: Reading, value: Any, origin: str) -> None:
    """Token files, with a weight before each or before none; words that the file does not set are named.

    Raises `UserError` if only some have a weight.
    """
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    unset = [word for word in words if UNSET.search(word)]
    weighted = any(map(_is_number, words)) if unset else len(words) % 2 == 0 and _is_number(words[0])
    sources: list[dict[str, Any]] = []
    weight: str | None = None
    for word in words:
        if weighted and weight is None and _is_number(word):
            weight = word
            continue
        if word not in unset:
            sources.append({"path": f"{word}.bin"} | ({} if weight is None else {"weight": float(weight)}))
        weight = None
    if weight is not None or len({"weight" in source for source in sources}) > 1:
        raise UserError(f"{origin}: must be paths alone, or a weight before every path")
    for word in unset:
        reading.drop(f"{origin}: {word}", "the file does not set it; add what it stands for to data.sources")
    if sources:
        reading.set("data.sources", sources, origin)


def _is_number(word: str) -> bool:
    try:
        return float(word) >= 0
    except ValueError:
        return False


def _split(reading: Reading, value: Any, origin: str) -> None:
    shares = [float(share) for share in str(value).split(",")]
    reading.set("data.held_out", round(sum(shares[1:]) / sum(shares), 6), origin)


def _shares(get: Get) -> str:
    """The shares of training, validation and test."""
    held_out = get("data.held_out")
    return f"{round(100 * (1 - held_out), 6):g},{round(100 * held_out, 6):g},0"


def _virtual(reading: Reading, value: Any, origin: str) -> None:
    check_count(value, origin)
    if value > 1:
        reading.set_all({"layout.schedule": "interleaved-1f1b", "layout.stages_per_rank": value}, origin)
    else:
        reading.claim(origin, Has("layout.schedule", "1f1b"))


def _last_step(path: str) -> Rule:
    """An interval; one as long as the run means after the last step only, once the steps are known."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        steps = reading.settings.get("training.steps", (None, ""))[0]
        reading.set(path, 0 if steps == value else value, origin)

    return both(rule, lambda get: get(path) or get("training.steps"))


RULES: Mapping[str, Rule] = {
    **COMBINED_RULES,
    "nproc_per_node": fact("ranks of a node"),
    "nproc-per-node": fact("ranks of a node"),
    "nnodes": fact("nodes"),
    "num-layers": "model.num_layers",
    "hidden-size": "model.hidden",
    "num-attention-heads": "model.num_heads",
    "num-query-groups": "model.num_kv_heads",
    "group-query-attention": fact("grouped heads"),
    "ffn-hidden-size": "model.ffn",
    "kv-channels": "model.head_dim",
    "max-position-embeddings": "model.max_positions",
    "seq-length": "data.sequence_length",
    "rotary-base": "model.rope_theta",
    "use-rope-scaling": when(fact("rope scaled"), True, Has("model.rope_scaling", None)),
    "rope-scaling-factor": fact("rope factor"),
    "qk-layernorm": always(fact("qk norm"), True),
    "add-qkv-bias": always(fact("qkv bias"), True),
    "openai-gelu": Has("model.family", "gpt2"),
    "no-bias-gelu-fusion": without("gpt2's GELU is approximated by tanh"),
    "padded-vocab-size": "model.vocab",
    "vocab-size": "model.vocab",
    "norm-epsilon": "model.norm_eps",
    "init-method-std": "model.init_std",
    "num-experts": "model.num_experts",
    "moe-router-topk": "model.experts_per_token",
    "moe-aux-loss-coeff": "model.balance_loss",
    "moe-ffn-hidden-size": "model.expert_ffn",
    "swiglu": fact("swiglu"),
    "normalization": fact("normalization"),
    "position-embedding-type": fact("positions"),
    "use-rotary-position-embeddings": always(fact("positions"), "rope"),
    "untie-embeddings-and-output-weights": when("model.tied_embeddings", False),
    "disable-bias-linear": always(fact("biases"), False),
    "micro-batch-size": "training.micro_batch",
    "global-batch-size": "training.global_batch",
    "rampup-batch-size": without("batch size ramp-up is not supported"),
    "train-iters": "training.steps",
    "train-samples": fact("samples"),
    "lr": "training.optimizer.lr",
    "min-lr": fact("min_lr"),
    "lr-decay-style": schedule_words({word.lower(): ours for word, ours in SCHEDULES.read.items()}),
    "lr-wsd-decay-iters": "training.lr_schedule.decay",
    "lr-wsd-decay-style": only("linear", "wsd always decays linearly"),
    "lr-warmup-iters": "training.lr_schedule.warmup",
    "lr-warmup-fraction": fact("warmup_ratio"),
    "lr-decay-iters": fact("decay steps"),
    "weight-decay": "training.optimizer.weight_decay",
    "adam-beta1": fact("beta1"),
    "adam-beta2": fact("beta2"),
    "adam-eps": "training.optimizer.eps",
    "clip-grad": positive("training.clip"),
    "optimizer": words("training.optimizer.name", OPTIMIZERS.read),
    "bf16": when("training.precision", "bf16"),
    "fp16": when("training.precision", "fp16"),
    "seed": "training.seed",
    "tensor-model-parallel-size": "layout.tp",
    "pipeline-model-parallel-size": "layout.pp",
    "num-virtual-stages-per-pipeline-rank": _virtual,
    "num-layers-per-virtual-pipeline-stage": without("set layout.schedule=interleaved-1f1b and layout.stages_per_rank"),
    "context-parallel-size": "layout.cp",
    "expert-model-parallel-size": "layout.ep",
    "use-distributed-optimizer": always(fact("zero"), 1),
    "use-megatron-fsdp": fact("Megatron-FSDP"),
    "data-parallel-sharding-strategy": choice(fact("sharding"), STAGES),
    "num-distributed-optimizer-instances": fact("instances"),
    "accumulate-allreduce-grads-in-fp32": always("training.reduce_dtype", "fp32"),
    "grad-reduce-in-bf16": always("training.reduce_dtype", "bf16"),
    "deterministic-mode": when("training.deterministic", True),
    "use-torch-fsdp2": always(fact("zero"), 3),
    "recompute-activations": always("training.recompute", "selective"),
    "recompute-granularity": choice("training.recompute", {"full": "full", "selective": "selective"}),
    "recompute-modules": without(
        "selective recomputation keeps matrix products and attention, and recomputes the rest"
    ),
    **dict.fromkeys(("train-data-path", "valid-data-path", "test-data-path"), without("set data.sources and held_out")),
    "data-path": _data,
    "split": both(_split, _shares),
    "tokenizer-model": "data.tokenizer",
    "save": "run_dir",
    "save-interval": _last_step("checkpoint.every"),
    "eval-interval": _last_step("training.evaluation.every"),
    "eval-iters": "training.evaluation.batches",
    "load": unsupported("`meshwright train --resume` continues from the newest checkpoint"),
    "tensorboard-dir": if_any(tracker("tensorboard"), True, no_tracker("tensorboard")),
    "wandb-project": if_any(tracker("wandb"), True, no_tracker("wandb")),
    "hidden-dropout": unsupported("models have no dropout"),
    "attention-dropout": unsupported("models have no dropout"),
    "reset-attention-mask": when("data.separate_documents", True),
    "reset-position-ids": when("data.separate_documents", True),
    "eod-mask-loss": claims_value("data.separate_documents"),
    "rotary-percent": only(1, "rope always rotates the whole head"),
    "calculate-per-token-loss": only(True, "the loss is always a mean over all tokens of a batch"),
    "attention-softmax-in-fp32": only(True, "the softmax of attention is always in fp32"),
    "tokenizer-type": cases({"HuggingFaceTokenizer": HasNot("data.tokenizer", "auto")}, TOKENIZER),
    **dict.fromkeys(("vocab-file", "merge-file"), without(TOKENIZER)),
    **dict.fromkeys(("exit-interval", "exit-duration-in-mins"), without("a run ends after training.steps")),
    "dataloader-type": only("single", "every sample is seen once in an epoch, in one shuffled order"),
    "make-vocab-size-divisible-by": without("set model.vocab to the padded number of rows"),
    **dict.fromkeys(OF_OTHER_MODELS, without(OTHER)),
    **no_effects({reason: {"": keys} for reason, keys in NO_EFFECT.items()}),
}


FAMILY_OF = {"qk norm": "qwen3", "qkv bias": "qwen2"}
OTHER_MODELS = re.compile(r"\bpretrain_(?:bert|t5|ict|mamba|hybrid|vlm|mimo|retro|vision)\w*\.py\b")
"""Megatron's programs for models that are no GPT."""


def is_flags(text: str) -> bool:
    """Whether a text holds Megatron's flags."""
    return bool(re.search(r"--(num-layers|hidden-size|tensor-model-parallel-size)(?![\w-])", text))


def read_script(reading: Reading, text: str, file: str) -> None:
    """Read a script, or a file of flags."""
    values = take_flags(reading, text, file, SWITCHES, LISTS)
    for program in dict.fromkeys(OTHER_MODELS.findall(text)):
        reading.drop(f"{file}: {program}", OTHER)
    read_megatron(reading, values, file)


def read_megatron(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read Megatron's flags."""
    open_ones = {flag: value for flag, value in values.items() if UNSET.search(str(value)) and flag != "data-path"}
    for flag, value in open_ones.items():
        reading.drop(f"{file}: {flag}={value}", "a shell variable that the file does not set")
    empty = [flag for flag in RULES.keys() & values.keys() - SWITCHES if values[flag] is True]
    for flag in sorted(empty):
        reading.drop(f"{file}: {flag}", "the file gives it no value")
    left = values.keys() - open_ones.keys() - set(empty)
    reading.take({flag: value for flag, value in values.items() if flag in left}, RULES, file)
    if "Megatron-FSDP" in reading.facts:
        fsdp = reading.facts["Megatron-FSDP"][1]
        stage, where = reading.facts.get("sharding", (3, ""))
        reading.facts["zero"] = stage, joined(fsdp, where, reading.facts.get("zero", (0, ""))[1])
    settle(reading, values.keys(), file, MegatronForm())


def settle(reading: Reading, given: Collection[str], file: str, form: MegatronForm) -> None:
    """Set what follows from several settings, and Megatron's defaults where no flag is `given`."""
    default = f"{file} (Megatron's default)"
    for name, beta in (("beta1", 0.9), ("beta2", 0.999)):
        if {"beta1", "beta2"} & reading.facts.keys() and name not in reading.facts:
            reading.fact(name, beta, default)
    if form.defaults or "model.name" not in reading.settings:
        _family(reading, given, file)
    if form.defaults:
        model_defaults(reading, given, file, form)
    if reading.known("rope scaled"):
        scaled = reading.facts["rope scaled"][1]
        factor, where = reading.facts.get("rope factor", (8.0, scaled))
        check_number(factor, where)
        reading.set("model.rope_scaling", {"factor": float(factor)}, joined(scaled, where))
    reading.count_nodes()
    reading.replicate(*reading.facts.get("instances", (1, "")))
    combine(reading, file, form)
    if form.whole:
        reading.default_all(DEFAULTS, default)
        if "lr-decay-style" not in given:
            reading.default("training.lr_schedule.name", "linear", default)
    if "eval-interval" in given:
        reading.default("training.evaluation.batches", 100, default)
    _schedule_and_optimizer(reading, given, file, form)


def _schedule_and_optimizer(reading: Reading, given: Collection[str], file: str, form: MegatronForm) -> None:
    """Name what Megatron's schedule and optimizer do by default, but ours do not."""
    settings = reading.settings
    if reading.value("training.lr_schedule.name") == "wsd" and "lr-wsd-decay-style" not in given:
        reading.drop(f"{file} (no {form.key('lr-wsd-decay-style')}: exponential)", "wsd always decays linearly")
    if reading.value("training.optimizer.name") == "muon":
        reading.notes.append(
            f"{settings['training.optimizer.name'][1]}: Megatron's Muon takes {form.key('lr')} and scales its update "
            "otherwise; set training.optimizer.muon_lr"
        )


def _family(reading: Reading, given: Collection[str], file: str) -> None:
    """The family that has these layers."""
    gated = reading.known("swiglu") or reading.known("positions") == "rope"
    kind = "llama" if gated else "gpt2"
    if "num-experts" in given:
        kind = "mixtral"
    elif gated and reading.known("qk norm"):
        kind = "qwen3"
    elif gated and reading.known("qkv bias"):
        kind = "qwen2"
    if kind == "mixtral" and "model.expert_ffn" in reading.settings:
        if "model.ffn" in reading.settings:
            width, where = reading.settings["model.ffn"]
            if width == reading.value("model.expert_ffn"):
                reading.claim(where, Has("model.ffn", width))
            else:
                reading.drop(where, "mixtral has only experts")
        reading.settings["model.ffn"] = reading.settings.pop("model.expert_ffn")
    for name in ("qk norm", "qkv bias"):
        if name in reading.facts and FAMILY_OF[name] != kind:
            reading.drop(reading.facts[name][1], f"{kind} has none; {FAMILY_OF[name]} has, without experts")
    biased, where = reading.facts.get("biases", (kind == "gpt2", ""))
    if bool(biased) != (kind == "gpt2"):
        reading.drop(where, f"{kind} always has biases" if kind == "gpt2" else f"{kind} has no such biases")
    elif where:
        reading.claim(where, Has("model.family", kind))
    layers = ("LayerNorm", "learned_absolute") if kind == "gpt2" else ("RMSNorm", "rope")
    for name, ours in zip(("normalization", "positions"), layers, strict=True):
        if reading.known(name, ours) != ours:
            reading.drop(reading.facts[name][1], f"{kind} has {ours}")
    named = ("swiglu", "positions", "normalization", "qk norm", "qkv bias")
    origins = [reading.facts[name][1] for name in named if name in reading.facts]
    reading.set("model.family", kind, "; ".join(origins) or f"{file} (no flag sets another activation)")
