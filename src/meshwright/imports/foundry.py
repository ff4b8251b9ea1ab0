"""LLM-Foundry's YAML configuration, which MosaicML's Composer trains."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.experts import COMPUTES, override_rules
from meshwright.imports.names import Names
from meshwright.imports.reading import NARROW, Reading, Rule, check_number, flat, joined
from meshwright.imports.rules import (
    above_zero,
    always,
    apply,
    cases,
    choice,
    claims_value,
    either,
    fact,
    groups,
    in_turn,
    listed,
    no_effects,
    only,
    peft,
    place,
    sets,
    tracker,
    unsupported,
    when,
    without,
    words,
)
from meshwright.imports.schedules import schedule_words
from meshwright.spec.errors import UserError

PRECISIONS = Names(
    "training.precision",
    {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32"},
    {"bf16": "bf16", "fp16": "fp16", "amp_fp8": "fp8"},
)
SCHEDULES = Names(
    "training.lr_schedule.name",
    {"cosine": "cosine_with_warmup", "linear": "linear_decay_with_warmup", "constant": "constant_with_warmup"},
)
TRAINED = Names("data.chat.train_on", {"last": ("last", "none"), "assistant": ("all", "none"), "all": ("all", "all")})
"""What of responses and of prompts is trained."""
SHARDING = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
LOADERS = ("json", "csv", "parquet")
"""Builders of `datasets`, which read local files."""
MASTERS = {**dict.fromkeys(("bf16", "bfloat16"), "bf16"), **dict.fromkeys(("f32", "fp32", "float32"), "fp32")}
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DECAYS = {"adamw": 0.01, "decoupled_adamw": 1e-5}
"""Optimizers, and the weight decay that each has by default."""
DEEPEST = 8
"""References to references."""


GELU = "imported as gpt2, whose GELU is approximate and whose norms are not in low precision"
HELD_OUT = "evaluation data is a fraction of the training data; set data.held_out"


def _time(path: str) -> Rule:
    """A time in batches (`100ba`)."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if match := re.fullmatch(r"(\d{1,12})ba", str(value)):
            reading.set(path, int(match[1]), origin)
        else:
            reading.drop(origin, "only batches are read (`100ba`)")

    return rule


def _duration(reading: Reading, value: Any, origin: str) -> None:
    if match := re.fullmatch(r"(\d{1,12})(ep)?", str(value)):  # Composer counts bare numbers in epochs
        reading.fact("epochs", int(match[1]), origin)
    else:
        apply(_time("training.steps"), reading, value, origin)


def _warmup(reading: Reading, value: Any, origin: str) -> None:
    if match := re.fullmatch(r"(\d*\.?\d+)dur", str(value)):
        reading.fact("warmup_ratio", float(match[1]), origin)
    else:
        apply(_time("training.lr_schedule.warmup"), reading, value, origin)


def _of_transformers(reading: Reading, value: Any, origin: str) -> None:
    reading.claim(origin, HasNot("model.name", None))
    reading.fact(COMPUTES, origin.partition(":")[0], origin)


def _degree(name: str) -> Rule:
    return cases({-1: Always("as FSDP finds it")}, fact(name))


def _is_undecayed(group: Mapping[str, Any]) -> bool:
    named = set(group) == {"param_str_match", "weight_decay"} and "norm" in group["param_str_match"]
    return named and group["weight_decay"] == 0


def _save_folder(reading: Reading, value: Any, origin: str) -> None:
    if "://" in str(value) or "{" in str(value):
        reading.drop(origin, "run_dir must be a local folder")
    else:
        reading.set("run_dir", value, origin)


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LOGS: {"": "progress_bar log_to_console console_log_interval python_log_level log_config",
                    "fsdp_config": "verbose"},
    NoEffect.NAMES: {"": "run_name"},
    NoEffect.GUARDS: {"": "dist_timeout"},
    NoEffect.EVALUATES: {"": "device_eval_batch_size eval_first icl_max_seq_len"},
    NoEffect.SAVES: {
        "": "save_latest_filename save_overwrite save_weights_only save_filename",
        "fsdp_config": "state_dict_type",
    },
    NoEffect.RESUMES: {"": "autoresume load_weights_only"},
    NoEffect.MEMORY: {
        "": "max_split_size_mb expandable_segments cuda_load_lazy",
        "train_loader.dataset": "allow_pad_trimming",
        "model": "init_device",
        "fsdp_config": "activation_checkpointing_reentrant sync_module_states",
    },
    NoEffect.READS: {"train_loader": "num_workers pin_memory timeout prefetch_factor persistent_workers"},
    NoEffect.KERNEL: {
        "model": "loss_fn use_flash_attention_2 attn_implementation attn_config.attn_impl",
        "fsdp_config": "use_orig_params",
    },
    NoEffect.OVERLAP: {"fsdp_config": "limit_all_gathers backward_prefetch forward_prefetch"},
    NoEffect.HUB: {"model": "use_auth_token"},
    NoEffect.CODE: {"model": "trust_remote_code"},
    NoEffect.CLASS: {"model": "peft_config.task_type"},
}  # fmt: skip

RULES: Mapping[str, Rule] = {
    "max_seq_len": "data.sequence_length",
    "global_seed": "training.seed",
    "seed": "training.seed",
    "accumulate_train_batch_on_tokens": only(True, "microbatches are always weighted by their trained tokens"),
    "model.name": cases({
        "mpt_causal_lm": sets({"model.family": "gpt2"}, GELU),
        "hf_causal_lm": _of_transformers,
    }),
    "model.pretrained_model_name_or_path": "model.name",
    "model.pretrained": either("model.weights", "pretrained", "random"),
    "model.master_weights_dtype": choice(
        cases({"bf16": sets(NARROW)}, Has("training.master_dtype", "fp32")), MASTERS, "fp32, bf16"
    ),
    "model.pretrained_lora_id_or_path": "finetune.start_from",
    "model.peft_config.peft_type": lambda reading, value, origin: apply(
        choice("finetune.method", {"LORA": "lora"}), reading, str(value).upper(), origin
    ),
    **peft("model.peft_config."),
    "model.d_model": "model.hidden",
    "model.n_heads": "model.num_heads",
    "model.n_layers": "model.num_layers",
    "model.expansion_ratio": fact("expansion"),
    "model.max_seq_len": "model.max_positions",
    "model.vocab_size": "model.vocab",
    "model.no_bias": unsupported("gpt2's biases stay"),
    "model.tie_word_embeddings": "model.tied_embeddings",
    "model.attn_config.alibi": unsupported("gpt2 has learned positions"),
    "model.attn_config.rope": unsupported("gpt2 has learned positions"),
    "model.attn_config.kv_n_heads": without("gpt2 has one key/value head per query head"),
    "model.config_overrides.max_seq_len": claims_value("data.sequence_length"),
    **override_rules("model.config_overrides"),
    "tokenizer.name": "data.tokenizer",
    "tokenizer.kwargs.model_max_length": claims_value("data.sequence_length"),
    "tokenizer.kwargs.padding_side": NoEffect.MEMORY,
    "train_loader.name": fact("loader"),
    "train_loader.drop_last": only(True, "batches are always whole"),
    "train_loader.dataset.shuffle_seed": without("training.seed also shuffles the data"),
    "train_loader.dataset.max_seq_len": claims_value("data.sequence_length"),
    "train_loader.dataset.decoder_only_format": only(True, "models have no encoder beside the decoder"),
    "train_loader.dataset.packing_ratio": always("data.packing", "best_fit"),
    "train_loader.dataset.remote": without("download the data, and set data.sources to text"),
    "train_loader.dataset.local": without("Mosaic's shards (MDS) are not supported; set data.sources to text"),
    "train_loader.dataset.hf_name": fact("data set"),
    "train_loader.dataset.hf_kwargs.data_files": fact("data files"),
    "train_loader.dataset.hf_kwargs.name": fact("subset"),
    "train_loader.dataset.split": fact("split"),
    "train_loader.dataset.target_responses": fact("responses"),
    "train_loader.dataset.target_prompts": fact("prompts"),
    "train_loader.dataset.shuffle": either("data.order", "shuffled", "given"),
    "scheduler.name": schedule_words(SCHEDULES.read),
    "scheduler.t_warmup": _warmup,
    "scheduler.t_max": only("1dur", "schedules always end at the last step"),
    "scheduler.alpha_f": "training.lr_schedule.final",
    "optimizer.name": fact("optimizer"),
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.betas": listed("training.optimizer.betas"),
    "optimizer.eps": "training.optimizer.eps",
    "optimizer.weight_decay": fact("weight decay"),
    "optimizer.param_groups": groups(_is_undecayed),
    "algorithms.gradient_clipping.clipping_type": only("norm", "gradients are always clipped by norm"),
    "algorithms.gradient_clipping.clipping_threshold": "training.clip",
    "max_duration": _duration,
    "eval_interval": _time("training.evaluation.every"),
    "eval_subset_num_batches": above_zero("training.evaluation.batches", Always("all evaluation data are read once")),
    "global_train_batch_size": "training.global_batch",
    "device_train_microbatch_size": "training.micro_batch",
    "precision": words("training.precision", PRECISIONS.read),
    "fsdp_config.sharding_strategy": choice(fact("zero"), SHARDING),
    "fsdp_config.mixed_precision": cases({
        "PURE": sets({"training.reduce_dtype": "bf16"}),
        "DEFAULT": Has("training.reduce_dtype", "fp32"),
    }),
    "fsdp_config.activation_checkpointing": when("training.recompute", "full", Has("training.recompute", "none")),
    "fsdp_config.activation_cpu_offload": unsupported("set layout.offload={activations: host}"),
    "fsdp_config.cpu_offload": unsupported("set layout.offload"),
    "fsdp_config.data_parallel_shard_degree": _degree("shard degree"),
    "fsdp_config.data_parallel_replicate_degree": _degree("replicate"),
    "compile_config.mode": in_turn(sets({"training.compile": True}), "training.compile_mode"),
    "save_interval": _time("checkpoint.every"),
    "save_num_checkpoints_to_keep": above_zero("checkpoint.keep_last", Has("checkpoint.keep_last", None)),
    "save_folder": _save_folder,
    "load_path": unsupported("`meshwright train --resume` continues from the newest checkpoint"),
    **{f"loggers.{name}": tracker(name) for name in ("wandb", "tensorboard")},
    **{f"loggers.{name}.*": NoEffect.LOGS for name in ("wandb", "tensorboard")},
    **dict.fromkeys(("eval_loader", "eval_loader.*", "eval_loaders"), without(HELD_OUT)),
    **dict.fromkeys(("callbacks", "callbacks.*"), without("set callbacks (docs/callbacks.md)")),
    **dict.fromkeys(("variables", "variables.*"), NoEffect.NAMED),
    **no_effects(NO_EFFECT),
}  # fmt: skip


def is_foundry(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an LLM-Foundry configuration."""
    return "global_train_batch_size" in values or "device_train_microbatch_size" in values


def read_foundry(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an LLM-Foundry configuration."""
    known = flat(values)
    known |= {key.removeprefix("variables."): value for key, value in known.items() if key.startswith("variables.")}
    shown = {key: _put_in(value, known, f"{file}: {key}") for key, value in flat(values).items()}
    shown = {key: value for key, value in shown.items() if not key.startswith("callbacks.")}
    shown |= {f"callbacks.{name}": inner for name, inner in (values.get("callbacks") or {}).items()}
    for name in ("wandb", "tensorboard"):  # their own settings are theirs
        if any(key.startswith(f"loggers.{name}.") for key in shown):
            reading.track(name, f"{file}: loggers.{name}")
    reading.take(shown, RULES, file)
    _optimizer(reading, file)
    _sources(reading, values, file)
    if reading.value("model.weights") != "random" and "model.name" in reading.settings:
        reading.default("finetune.method", "full", f"{file}: pretrained weights, no peft_config")
    if "expansion" in reading.facts and (hidden := reading.settings.get("model.hidden")):
        ratio, origin = reading.facts["expansion"]
        check_number(ratio, origin)
        check_number(*hidden)
        reading.set("model.ffn", int(ratio * hidden[0]), f"{origin} x {hidden[1]}")
    if "fsdp_config" in values and "zero" not in reading.facts:
        reading.fact("zero", 3, f"{file}: fsdp_config (Composer's default: FULL_SHARD)")
    if "shard degree" in reading.facts:
        reading.fact("shard", *reading.facts["shard degree"])
        copies, where = reading.facts.get("replicate", (1, ""))
        reading.claim(where, Has("layout.dp_replicate", copies))
    else:
        reading.replicate(*reading.facts.get("replicate", (1, "")))
    defaults = {"training.precision": "bf16", "training.clip": None, "training.lr_schedule.final": 0.0}
    defaults |= {"training.seed": 17, "training.optimizer.lr": 1e-3, "data.held_out": 0.0}
    reading.default_all(defaults, f"{file} (LLM-Foundry's default)")


def _put_in(value: Any, known: Mapping[str, Any], origin: str) -> Any:
    """The value with its references `${name}` to other keys put in. Raises `UserError` if they go in circles."""
    for _ in range(DEEPEST):
        if not isinstance(value, str) or not (match := REFERENCE.search(value)):
            return value
        replacement = known.get(match[1])
        if replacement is None or isinstance(replacement, list):
            return value
        value = replacement if match[0] == value else value.replace(match[0], str(replacement)[:200])
    raise UserError(f"{origin}: its references are circular")


def _sources(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """The data set of the loader `finetuning`, which pads rows, and trains on the last answer of each."""
    loader = values.get("train_loader")
    kind, loader_origin = reading.facts.get("loader", ("text", ""))
    if kind == "text":
        reading.claim(loader_origin, Has("data.packing", "concatenated"))
    elif kind == "finetuning":
        reading.claim(loader_origin, HasNot("data.packing", "concatenated"))
    else:
        reading.drop(loader_origin, "supported: text, finetuning")
    if not isinstance(loader, Mapping) or loader.get("name") != "finetuning":
        return
    default = f"{file}: train_loader.name=finetuning (LLM-Foundry's default)"
    reading.default("data.packing", "padded", default)
    name, origin = reading.facts.get("data set", ("", ""))
    files, where = reading.facts.get("data files", (None, ""))
    given = {key: reading.facts[key] for key in ("split", "subset") if key in reading.facts}
    more, parts = {key: value for key, (value, _) in given.items()}, "; ".join(one for _, one in given.values())
    if name in LOADERS and files:
        paths = [files] if isinstance(files, str) else list(files)
        reading.set("data.sources", [{"path": str(path), **more} for path in paths], f"{origin}; {where}; {parts}")
    elif name:
        reading.set("data.sources", [{"path": place(name), **more}], f"{origin}; {parts}")
    responses, where = reading.facts.get("responses", ("last", default))
    prompts, also = reading.facts.get("prompts", ("none", default))
    trained = TRAINED.read.get((responses, prompts))
    if trained is None:
        reading.drop(f"{where}; {also}", "set data.chat.train_on to assistant, last or all")
    else:
        reading.set("data.chat.train_on", trained, joined(where, also))


def _optimizer(reading: Reading, file: str) -> None:
    """decoupled_adamw multiplies weights by the decay itself, not by the decay times the learning rate."""
    name, origin = reading.facts.get("optimizer", ("decoupled_adamw", ""))
    if name in DECAYS:
        reading.set("training.optimizer.name", "adamw", origin) if origin else None
    else:
        reading.drop(origin, f"there are {' and '.join(DECAYS)}")
    plain = (DECAYS.get(name, 0.0), f"{file} ({name}'s default weight_decay)")
    decay, where = reading.facts.get("weight decay", plain)
    check_number(decay, where)
    if decay and "undecayed" not in reading.facts:
        reading.notes.append(f"{where}: LLM-Foundry also decays norms and biases; Meshwright does not")
    if name == "decoupled_adamw" and decay:
        lr, lr_origin = reading.settings.get("training.optimizer.lr", (1e-3, f"{file} (decoupled_adamw's default lr)"))
        check_number(lr, lr_origin)
        if not lr:
            reading.drop(where, "decoupled_adamw's decay cannot be converted, because the learning rate is 0")
            return
        decay = float(f"{decay / lr:.6g}")
        where = f"{where}, divided by {lr_origin}: decoupled_adamw does not multiply decay by the learning rate"
    reading.set("training.optimizer.weight_decay", decay, where)
