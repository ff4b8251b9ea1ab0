"""LLM-Foundry's YAML configuration, which MosaicML's Composer trains."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, apply, check_number, fact, flat, nothing, words
from meshwright.spec.errors import UserError

PRECISIONS = {"amp_bf16": "bf16", "bf16": "bf16", "amp_fp16": "fp16", "fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}
SHARDING = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEEPEST = 8
"""References to references."""


def _steps(value: Any, origin: str, reading: Reading) -> int | None:
    """A time in batches (`100ba`), or None if it is in another unit."""
    text = str(value)
    if match := re.fullmatch(r"(\d{1,12})(ba)?", text):
        return int(match[1])
    reading.give_up(origin, "counted in steps only (`100ba`)")
    return None


def _time(path: str) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        steps = _steps(value, origin, reading)
        if steps is not None:
            reading.set(path, steps, origin)

    return rule


def _duration(reading: Reading, value: Any, origin: str) -> None:
    if str(value).endswith("ep"):
        reading.fact("epochs", int(str(value)[:-2]), origin)
    else:
        apply(_time("training.steps"), reading, value, origin)


def _model(reading: Reading, value: Any, origin: str) -> None:
    if value == "mpt_causal_lm":
        reading.set("model.family", "gpt2", origin)
        reading.notes.append(f"{origin}: MPT's exact GELU and norms in low precision are not gpt2's")
    elif value != "hf_causal_lm":
        reading.give_up(origin, "there are mpt_causal_lm and hf_causal_lm")


def _biases(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.give_up(origin, "gpt2's biases stay")


def _loss_head(reading: Reading, value: Any, origin: str) -> None:
    reading.fact("expansion", value, origin)


def _data(reading: Reading, value: Any, origin: str) -> None:
    reading.give_up(origin, "Mosaic's shards (MDS) are not read; give data.sources text")


def _hub(reading: Reading, value: Any, origin: str) -> None:
    local = str(value).startswith((".", "/"))
    reading.set("data.sources", [{"path": str(value) if local else f"hub:{value}"}], origin)


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    if str(value) in SHARDING:
        reading.fact("zero", SHARDING[str(value)], origin)
    else:
        reading.give_up(origin, f"there are {', '.join(SHARDING)}")


def _mixed(reading: Reading, value: Any, origin: str) -> None:
    if value == "PURE":
        reading.set("training.reduce_dtype", "bf16", origin)
    elif value != "DEFAULT":
        reading.give_up(origin, "there are PURE and DEFAULT")


def _recompute(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.set("training.recompute", "full", origin)


def _save_folder(reading: Reading, value: Any, origin: str) -> None:
    if "://" in str(value) or "{" in str(value):
        reading.give_up(origin, "run_dir is a folder")
    else:
        reading.set("run_dir", value, origin)


def _trackers(name: str) -> Rule:
    return lambda reading, value, origin: reading.set("trackers", [name], origin)


LEFT_TO_US = (
    *("progress_bar", "log_to_console", "console_log_interval", "python_log_level", "dist_timeout", "run_name"),
    *("device_eval_batch_size", "eval_first", "log_config", "icl_max_seq_len", "save_latest_filename", "autoresume"),
    *("train_loader.num_workers", "train_loader.drop_last", "eval_loader.num_workers", "eval_loader.drop_last"),
    *("train_loader.name", "eval_loader.name", "eval_loader.dataset.shuffle", "train_loader.dataset.shuffle_seed"),
    *("tokenizer.kwargs.model_max_length", "tokenizer.kwargs.padding_side", "model.init_device", "model.loss_fn"),
    *(
        "model.pretrained",
        "model.config_overrides.max_seq_len",
        "eval_loader.label",
        "save_overwrite",
        "save_weights_only",
    ),
    *(
        "fsdp_config.activation_checkpointing_reentrant",
        "fsdp_config.activation_cpu_offload",
        "fsdp_config.limit_all_gathers",
    ),
    *(
        "fsdp_config.verbose",
        "fsdp_config.state_dict_type",
        "fsdp_config.use_orig_params",
        "fsdp_config.backward_prefetch",
    ),
    *("fsdp_config.sync_module_states", "fsdp_config.forward_prefetch", "fsdp_config.cpu_offload", "max_split_size_mb"),
    *("train_loader.dataset.split", "eval_loader.dataset.split", "model.use_auth_token", "model.use_flash_attention_2"),
    *("train_loader.dataset.max_seq_len", "eval_loader.dataset.max_seq_len", "eval_loader.dataset.local"),
    *("eval_loader.dataset.remote", "eval_loader.dataset.hf_name", "eval_loader.dataset.shuffle_seed"),
    *(
        "train_loader.dataset.remote",
        "train_loader.dataset.decoder_only_format",
        "eval_loader.dataset.decoder_only_format",
    ),
    *("train_loader.dataset.allow_pad_trimming", "eval_loader.dataset.allow_pad_trimming", "load_weights_only"),
)

RULES: Mapping[str, Rule] = {
    "max_seq_len": "data.sequence_length",
    "global_seed": "training.seed",
    "seed": "training.seed",
    "model.name": _model,
    "model.pretrained_model_name_or_path": "model.name",
    "model.d_model": "model.hidden",
    "model.n_heads": "model.num_heads",
    "model.n_layers": "model.num_layers",
    "model.expansion_ratio": _loss_head,
    "model.max_seq_len": "model.max_positions",
    "model.vocab_size": "model.vocab",
    "model.no_bias": _biases,
    "model.tie_word_embeddings": "model.tied_embeddings",
    "model.attn_config.attn_impl": nothing("PyTorch chooses the kernel of attention"),
    "model.attn_config.alibi": nothing("gpt2's positions are learned"),
    "model.attn_config.rope": nothing("gpt2's positions are learned"),
    "model.attn_config.kv_n_heads": nothing("gpt2's keys and values have a head for each query's"),
    "tokenizer.name": "data.tokenizer",
    "train_loader.dataset.local": _data,
    "train_loader.dataset.hf_name": _hub,
    "train_loader.dataset.shuffle": lambda reading, value, origin: reading.set(
        "data.order", "shuffled" if value else "given", origin
    ),
    "scheduler.name": words(
        "training.lr_schedule.name",
        {
            "cosine_with_warmup": "cosine",
            "linear_decay_with_warmup": "linear",
            "constant_with_warmup": "constant",
        },
    ),
    "scheduler.t_warmup": _time("training.lr_schedule.warmup"),
    "scheduler.alpha_f": "training.lr_schedule.final",
    "optimizer.name": fact("optimizer"),
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.betas": lambda reading, value, origin: reading.set("training.optimizer.betas", list(value), origin),
    "optimizer.eps": "training.optimizer.eps",
    "optimizer.weight_decay": fact("weight decay"),
    "algorithms.gradient_clipping.clipping_type": lambda reading, value, origin: (
        None if value == "norm" else reading.give_up(origin, "gradients are clipped by their norm")
    ),
    "algorithms.gradient_clipping.clipping_threshold": "training.clip",
    "max_duration": _duration,
    "eval_interval": _time("training.evaluation.every"),
    "eval_subset_num_batches": lambda reading, value, origin: (
        reading.set("training.evaluation.batches", value, origin) if value > 0 else None
    ),
    "global_train_batch_size": "training.global_batch",
    "device_train_microbatch_size": "training.micro_batch",
    "precision": words("training.precision", PRECISIONS),
    "fsdp_config.sharding_strategy": _sharding,
    "fsdp_config.mixed_precision": _mixed,
    "fsdp_config.activation_checkpointing": _recompute,
    "save_interval": _time("checkpoint.every"),
    "save_num_checkpoints_to_keep": lambda reading, value, origin: (
        reading.set("checkpoint.keep_last", value, origin) if value > 0 else None
    ),
    "save_folder": _save_folder,
    "load_path": nothing("`meshwright train --resume` continues from the newest checkpoint"),
    "loggers.wandb": _trackers("wandb"),
    "loggers.tensorboard": _trackers("tensorboard"),
    "eval_loader": nothing("data.held_out is a share of the data"),
    **dict.fromkeys(LEFT_TO_US, nothing("nothing that is trained depends on it, or our trainer decides it")),
}


def is_foundry(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an LLM-Foundry configuration."""
    return "global_train_batch_size" in values or "device_train_microbatch_size" in values


def read_foundry(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an LLM-Foundry configuration."""
    leaves = flat({key: value for key, value in values.items() if key != "variables"})
    known = flat(values)
    known |= {key.removeprefix("variables."): value for key, value in known.items() if key.startswith("variables.")}
    leaves = {key: _put_in(value, known, f"{file}: {key}") for key, value in leaves.items()}
    shown = {key: value for key, value in leaves.items() if not key.startswith("callbacks.")}
    for section in ("wandb", "tensorboard"):  # their own settings are theirs
        inner = [key for key in shown if key.startswith(f"loggers.{section}.")]
        shown |= {f"loggers.{section}": True} if inner else {}
        for key in inner:
            reading.give_up(f"{file}: {key}={shown.pop(key)}", "only shown")
    if ratio := shown.pop("train_loader.dataset.packing_ratio", None):
        reading.set("data.packing", "best_fit", f"{file}: train_loader.dataset.packing_ratio={ratio}")
    reading.seen += [f"{file}: {key}={value}" for key, value in flat(values).items() if key.startswith("variables.")]
    reading.take(shown, RULES, file)
    for name, inner in (values.get("callbacks") or {}).items():
        reading.give_up(f"{file}: callbacks.{name}={inner}", "callbacks are ours (docs/callbacks.md)")
    _optimizer(reading, file)
    if "expansion" in reading.facts and (hidden := reading.settings.get("model.hidden")):
        ratio, origin = reading.facts["expansion"]
        check_number(ratio, origin)
        check_number(*hidden)
        reading.set("model.ffn", int(ratio * hidden[0]), f"{origin} x {hidden[1]}")
    if "fsdp_config" in values and "zero" not in reading.facts:
        reading.fact("zero", 3, f"{file}: fsdp_config (Composer's default: FULL_SHARD)")
    defaults = {"training.precision": "bf16", "training.clip": None, "training.lr_schedule.final": 0.0}
    for path, value in {**defaults, "training.seed": 17}.items():
        reading.default(path, value, f"{file} (LLM-Foundry's default)")


def _put_in(value: Any, known: Mapping[str, Any], origin: str) -> Any:
    """The value with its references `${name}` to other keys put in. Raises `UserError` if they go in circles."""
    for _ in range(DEEPEST):
        if not isinstance(value, str) or not (match := REFERENCE.search(value)):
            return value
        found = known.get(match[1])
        if found is None or isinstance(found, list):
            return value
        value = found if match[0] == value else value.replace(match[0], str(found)[:200])
    raise UserError(f"{origin}: its references go in circles")


def _optimizer(reading: Reading, file: str) -> None:
    """decoupled_adamw multiplies weights by the decay itself, not by the decay times the learning rate."""
    name, origin = reading.facts.get("optimizer", ("", ""))
    if name in ("decoupled_adamw", "adamw"):
        reading.set("training.optimizer.name", "adamw", origin)
    elif name:
        reading.give_up(origin, "there are adamw and decoupled_adamw")
    if "weight decay" not in reading.facts:
        reading.default("training.optimizer.weight_decay", 0.0, f"{file} (no weight_decay)")
        return
    decay, where = reading.facts["weight decay"]
    check_number(decay, where)
    if name == "decoupled_adamw" and decay:
        lr, why = reading.settings.get("training.optimizer.lr", (None, ""))
        if lr is None:
            reading.give_up(where, "decoupled_adamw's decay is over the learning rate, which is not said")
            return
        check_number(lr, why)
        decay, where = float(f"{decay / lr:.6g}"), f"{where}, over {why}: decoupled_adamw's is not multiplied by it"
    reading.set("training.optimizer.weight_decay", decay, where)
