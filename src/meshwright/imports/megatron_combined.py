"""Settings that follow from several of Megatron-LM's flags, and its defaults that a recipe lacks.

Megatron-Bridge and NeMo have the same settings under other names, which a `MegatronForm` lists.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.imports.claims import Always, Has, HasNot
from meshwright.imports.reading import Reading, Rule, check_count, joined
from meshwright.imports.rules import dotted, fact
from meshwright.spec.errors import UserError

SWITCHES = frozenset(dotted({"":
    "accumulate-allreduce-grads-in-fp32 add-qkv-bias async-save attention-softmax-in-fp32 bf16 deterministic-mode "
    "disable-bias-linear eod-mask-loss first-last-layers-bf16 fp16 fp8-param-gather grad-reduce-in-bf16 "
    "group-query-attention log-throughput moe-grouped-gemm no-bias-gelu-fusion no-bias-swiglu-fusion "
    "no-gradient-accumulation-fusion no-rope-fusion no-masked-softmax-fusion openai-gelu overlap-grad-reduce "
    "overlap-param-gather qk-layernorm recompute-activations reset-attention-mask reset-position-ids "
    "sequence-parallel swiglu untie-embeddings-and-output-weights use-distributed-optimizer use-flash-attn "
    "use-mcore-models use-megatron-fsdp use-rope-scaling use-rotary-position-embeddings use-torch-fsdp2 "
    "fp4-param-gather no-fp8-wgrad mock-data tp-comm-overlap qk-clip manual-gc tokenizer-hf-use-fast "
    "no-async-tensor-model-parallel-allreduce no-create-attention-mask-in-dataloader "
    "overlap-param-gather-with-optimizer-step moe-shared-expert-overlap overlap-moe-expert-parallel-comm "
    "moe-permute-fusion no-bias-dropout-fusion cross-entropy-loss-fusion distribute-saved-activations "
    "moe-layer-recompute log-params-norm log-num-zeros-in-grad log-memory-to-tensorboard log-timers-to-tensorboard "
    "log-validation-ppl-to-tensorboard log-progress log-straggler log-world-size-to-tensorboard log-energy "
    "no-mmap-bin-files exit-signal-handler no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad "
    "disable-straggler-on-startup use-dist-ckpt no-save-optim no-save-rng ckpt-fully-parallel-save "
    "auto-detect-ckpt-format ckpt-assume-constant-structure no-load-optim no-load-rng finetune "
    "exit-on-missing-checkpoint use-persistent-ckpt-worker dist-ckpt-optim-fully-reshardable calculate-per-token-loss "
    "trust-remote-code apply-layernorm-1p squared-relu apply-query-key-layer-scaling ckpt-fully-parallel-load "
    "override-opt_param-scheduler use-checkpoint-opt_param-scheduler"
}))  # fmt: skip
"""Flags that have no value."""
LISTS = frozenset(dotted({"":
    "data-path train-data-path valid-data-path test-data-path recompute-modules cp-comm-type "
    "moe-router-load-balancing-type moe-aux-loss-coeff rampup-batch-size iterations-to-skip spec cuda-graph-scope "
    "cuda-graph-modules offload-modules validation-set-names profile-ranks "
    "ddp-param-name-patterns-for-fp32-local-accumulation tokenizer-special-tokens modules-to-filter "
    "gtp-remat-opt-in-modules high-priority-stream-groups retriever-report-topk-accuracies rl-inference-parsers "
    "mrope-section"
}))  # fmt: skip
"""Flags that have several values."""
COMBINED = {
    "fp8-format": "fp8 format",
    "fp8-recipe": "fp8 recipe",
    "fp8-margin": "fp8 margin",
    "fp8-amax-history-len": "fp8 history",
    "fp8-amax-compute-algo": "fp8 algorithm",
    "fp8-param-gather": "fp8 weights",
    "no-fp8-wgrad": "fp8 weight gradients",
    "first-last-layers-bf16": "fp8 ends",
    "num-layers-at-start-in-bf16": "fp8 first",
    "num-layers-at-end-in-bf16": "fp8 last",
    "fp4-format": "fp4 format",
    "fp4-recipe": "fp4 recipe",
    "lr-warmup-samples": "warmup samples",
    "lr-decay-samples": "decay samples",
    "lr-wsd-decay-samples": "wsd samples",
    "recompute-method": "recompute method",
    "recompute-num-layers": "recompute layers",
}
"""Flag -> the fact that it states."""
REQUIRED = {"num-layers": "model.num_layers", "hidden-size": "model.hidden", "num-attention-heads": "model.num_heads"}
FORMATS = {"hybrid": ("tensorwise", "delayed"), "e4m3": ("blockwise", "mxfp8")}
"""Format of fp8's numbers -> our recipes that use it. hybrid: gradients are in e5m2."""

RULES: Mapping[str, Rule] = {flag: fact(name) for flag, name in COMBINED.items()}


def _as_flag(flag: str) -> str:
    return f"--{flag}"


def _two_thirds(hidden: int) -> int:
    return int((4 * hidden * 2 / 3) / 64) * 64


@dataclass(frozen=True)
class MegatronForm:
    """How a file writes Megatron's settings, and where its program's defaults differ from Megatron-LM's."""

    key: Callable[[str], str] = _as_flag
    """Megatron-LM's flag -> the name in the file."""
    groups_when_asked: bool = True
    """Whether key and value heads need a switch of their own besides their number."""
    gated_ffn: Callable[[int], int] = _two_thirds
    """The model's width -> the default inner width of gated layers."""
    defaults: bool = True
    """Whether Megatron's defaults of the model count; the classes of single models have others."""
    whole: bool = True
    """Whether Megatron's other defaults count; a file that changes a recipe in Python keeps that one's settings."""


def combine(reading: Reading, file: str, form: MegatronForm) -> None:
    """Set what several flags say together."""
    _low_precision(reading, file, form)
    _in_samples(reading)
    recomputation(reading)


def model_defaults(reading: Reading, given: Collection[str], file: str, form: MegatronForm) -> None:
    """Megatron's defaults of the model where no flag is `given`; those that no recipe can express are named."""
    settings = reading.settings
    family = settings["model.family"][0]
    if "untie-embeddings-and-output-weights" not in given:
        reading.default("model.tied_embeddings", True, f"{file} (Megatron's default)")
    if family != "gpt2" and "disable-bias-linear" not in given:
        reading.drop(f"{file} (no {form.key('disable-bias-linear')})", f"{family} has no such biases")
    hidden, origin = settings.get("model.hidden", (None, ""))
    default = f"{file} (Megatron's default)"
    reading.default("model.norm_eps", 1e-5, default)
    if family != "gpt2":
        reading.default("model.rope_theta", 10000, default)
        if hidden is not None and reading.known("swiglu"):
            check_count(hidden, origin)
            reading.default("model.ffn", form.gated_ffn(hidden), f"{default} for {origin}")
    if family == "mixtral":
        reading.default("model.balance_loss", 0.0, default)
        reading.default("model.experts_per_token", 2, default)
    for flag, path in REQUIRED.items():
        if flag not in given and "model.name" not in settings:
            reading.drop(f"{file} (no {form.key(flag)})", f"Megatron has no default; set {path}")
    if form.groups_when_asked:
        _key_value_heads(reading)
    lacks = {"normalization": "RMSNorm", "position-embedding-type": "rope", "swiglu": "SwiGLU"}
    if "use-rotary-position-embeddings" in given:
        lacks.pop("position-embedding-type")
    for flag, ours in lacks.items() if family != "gpt2" else ():
        if flag not in given:
            reading.notes.append(f"{file} has no {form.key(flag)}, so Megatron has no {ours}; {family} has it")
    for flag in ("hidden-dropout", "attention-dropout"):
        if flag not in given:
            reading.notes.append(
                f"{file} has no {form.key(flag)}: Megatron's default is 0.1; models have no dropout here"
            )


def _key_value_heads(reading: Reading) -> None:
    """Megatron-LM groups heads only where a flag says so."""
    path, (grouped, flag_origin) = "model.num_kv_heads", reading.facts.get("grouped heads", (False, ""))
    if not grouped and path in reading.settings:
        _, origin = reading.settings.pop(path)
        reading.drop(origin, "without --group-query-attention it has no effect")
    elif grouped:
        reading.default(path, 1, f"{flag_origin} (Megatron's default)")
        reading.claim(flag_origin, HasNot(path, None))


def _low_precision(reading: Reading, file: str, form: MegatronForm) -> None:
    """The precision of matrix products, with its recipe."""
    facts = {name: reading.facts[name] for name in COMBINED.values() if name in reading.facts}
    eight, four = facts.pop("fp8 format", None), facts.pop("fp4 format", None)
    facts = {name: fact for name, fact in facts.items() if name.startswith(("fp8", "fp4"))}
    if four:
        _narrow(reading, "nvfp4", four[1], form)
        for name, (value, origin) in facts.items():
            if (name, value) == ("fp4 recipe", "nvfp4"):
                reading.claim(origin, Has("training.precision", "nvfp4"))
            else:
                reading.drop(origin, "unknown to nvfp4")
    elif eight:
        _eight_bits(reading, eight, facts, file, form)
    else:
        for _, origin in facts.values():
            formats = f"{form.key('fp8-format')} or {form.key('fp4-format')}"
            reading.drop(origin, f"without {formats} it has no effect")


def _eight_bits(
    reading: Reading, given: tuple[Any, str], facts: dict[str, tuple[Any, str]], file: str, form: MegatronForm
) -> None:
    kind, origin = given
    recipe, where = facts.pop("fp8 recipe", ("delayed", f"{file} (Megatron's default)"))
    known = [one for recipes in FORMATS.values() for one in recipes]
    if kind not in FORMATS or recipe not in known:
        reading.drop(origin, f"supported: {', '.join(FORMATS)}, with recipe {', '.join(known)}")
        for unused in (where, *(fact[1] for fact in facts.values())):
            reading.drop(unused, "the format or the recipe is not supported")
        return
    if recipe not in FORMATS[kind]:
        grads = "in e5m2" if recipe in FORMATS["hybrid"] else "in e4m3"
        reading.drop(origin, f"products are imported, but gradients of recipe {recipe} are {grads}")
    _narrow(reading, "mxfp8" if recipe == "mxfp8" else "fp8", joined(origin, where), form)
    if recipe != "mxfp8":
        reading.set("training.low_precision.recipe", recipe, where)
    if recipe == "delayed":
        _delayed(reading, facts, where)
    else:
        scales = f"recipe {recipe} takes no scales from previous steps"
        reading.ignore("fp8 history", "fp8 margin", "fp8 algorithm", reason=scales)
    _wide_layers(reading, facts, form)
    reading.ignore("fp8 weights", reason="weights stay in bf16, and are rounded to fp8 for each product")
    reading.ignore("fp8 weight gradients", reason=f"recipe {recipe} computes weight gradients in fp8, too")
    reading.ignore("fp4 recipe", reason=f"without {form.key('fp4-format')} it has no effect")


def _delayed(reading: Reading, facts: dict[str, tuple[Any, str]], where: str) -> None:
    """How scales follow from previous steps."""
    length, origin = facts.get("fp8 history", (1, where))
    algorithm, algorithm_origin = facts.get("fp8 algorithm", ("most_recent", where))
    if algorithm not in ("most_recent", "max"):
        reading.drop(algorithm_origin, "supported: most_recent, max")
    elif algorithm == "most_recent":  # of a history, however long
        length = 1
    reading.set("training.low_precision.amax_history", length, joined(algorithm_origin, origin))
    reading.set_fact("training.low_precision.margin", "fp8 margin")


def _narrow(reading: Reading, precision: str, origin: str, form: MegatronForm) -> None:
    """Set the precision of products beside that of everything else, which another flag has set."""
    path = "training.precision"
    beside, where = reading.settings.pop(path, ("fp32", ""))
    reading.set(path, precision, f"{origin}; {where}" if beside == "bf16" and where != origin else origin)
    if beside == "fp16":
        reading.drop(where, f"beside {precision} products everything is in bf16")
    elif beside == "fp32":
        reading.set("training.low_precision.compute", "fp32", f"no {form.key('bf16')}")


def _wide_layers(reading: Reading, facts: dict[str, tuple[Any, str]], form: MegatronForm) -> None:
    """The first and last layers that stay in bf16."""
    ends = [facts.get(f"fp8 {end}") for end in ("first", "last")]
    if "fp8 ends" not in facts:
        for given in filter(None, ends):
            reading.drop(given[1], f"without {form.key('first-last-layers-bf16')} it has no effect")
        return
    first, last = (one[0] if one else 1 for one in ends)
    origins = [facts["fp8 ends"][1], *(one[1] for one in ends if one)]
    for number, given in zip((first, last), ends, strict=True):
        if not isinstance(number, int) or not 0 <= number <= 1000:
            raise UserError(f"{given[1] if given else origins[0]}: must be a whole number of layers")
    keep = [f"layers.{index}" for index in range(first)] + [f"layers.{-index}" for index in range(last, 0, -1)]
    reading.set("training.low_precision.keep", keep, joined(*origins))


def _in_samples(reading: Reading) -> None:
    """Steps of a run whose length is given in samples."""
    batch, origin = _global_batch(reading)
    settings = {
        "samples": "training.steps",
        "warmup samples": "training.lr_schedule.warmup",
        "wsd samples": "training.lr_schedule.decay",
    }
    for name, path in settings.items():
        if name not in reading.facts:
            continue
        samples, where = reading.facts[name]
        if samples == 0 and name == "warmup samples":
            reading.claim(where, Always("it is Megatron's default: warm-up is not given in samples"))
            continue
        check_count(samples, where)
        if batch is None:
            if name != "samples":  # which is named in any case
                reading.drop(where, f"set {path} to the samples divided by the global batch")
            continue
        reading.facts.pop(name)
        steps = samples // batch if name == "samples" else round(samples / batch)
        if name == "samples" and not steps:
            raise UserError(f"{where}: is less than one batch ({origin})")
        reading.set(path, max(1, steps), f"{where}; {origin}")
    if "decay samples" in reading.facts:
        samples, where = reading.facts["decay samples"]
        check_count(samples, where)
        if batch is None or samples // batch != reading.settings.get("training.steps", (None, ""))[0]:
            reading.drop(where, "schedules always end at the last step")
        else:
            reading.claim(where, Has("training.steps", samples // batch))
    _share_of_the_decay(reading, batch)


def _share_of_the_decay(reading: Reading, batch: int | None) -> None:
    """Megatron's share of warm-up is one of the decay, not of the run."""
    decay = reading.facts.get("decay steps")
    if decay is None and batch and "decay samples" in reading.facts:
        samples, where = reading.facts["decay samples"]
        decay = samples // batch, where
    if decay and "warmup_ratio" in reading.facts:
        ratio, where = reading.facts.pop("warmup_ratio")
        reading.set("training.lr_schedule.warmup", round(ratio * decay[0]), f"{where}; {decay[1]}")


def _global_batch(reading: Reading) -> tuple[int | None, str]:
    """Sequences of a step: given, or one micro batch of every data-parallel rank."""
    settings = reading.settings
    if "training.global_batch" in settings:
        check_count(*settings["training.global_batch"])
        return settings["training.global_batch"]
    micro, ranks = settings.get("training.micro_batch"), reading.facts.get("ranks")
    if micro is None or ranks is None:
        return None, ""
    check_count(*micro)
    return (micro[0] * max(1, ranks[0] // reading.model_ranks())), f"{micro[1]}; {ranks[1]}; no --global-batch-size"


def recomputation(reading: Reading) -> None:
    """How many layers recompute everything."""
    method, where = reading.facts.get("recompute method", (None, ""))
    layers, origin = reading.facts.get("recompute layers", (None, ""))
    path = "training.recompute"
    kind, kind_origin = reading.settings.get(path, ("none", ""))
    if kind != "full":
        for unused in filter(None, (where, origin)):
            reading.drop(unused, "it only applies to recompute granularity full")
    elif method == "block" and layers is not None:
        check_count(layers, origin)
        reading.settings[path] = {"full": layers}, f"{kind_origin}; {where}; {origin}"
    elif method not in (None, "uniform", "block"):
        reading.drop(where, "supported: uniform, block")
    elif layers not in (None, 1):
        reading.drop(origin, "every layer keeps its input, not one layer of several")
    if method != "block":
        reading.claim(f"{where}; {origin}", Has(path, "full"))
