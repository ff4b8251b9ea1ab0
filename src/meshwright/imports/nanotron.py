"""Nanotron's YAML configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.names import PRECISIONS, Names
from meshwright.imports.reading import Reading, Rule, check_count, check_number, flat, joined
from meshwright.imports.rules import (
    above_zero,
    apply,
    choice,
    degree,
    fact,
    no_effects,
    only,
    place,
    positive,
    unsupported,
    when,
    without,
)
from meshwright.spec.errors import UserError

OPTIMIZERS = Names("training.optimizer.name", {"adamw": "adamW"})
SHAPES = {"linear": "linear", "cosine": "cosine"}
SIZE = "model.model_config."


def _zero(reading: Reading, value: Any, origin: str) -> None:
    """Above 0 it shards the optimizer's state, whatever the number."""
    reading.fact("zero", min(value, 1), origin)


def _excluded(reading: Reading, value: Any, origin: str) -> None:
    if not value:
        reading.claim(origin, Has("training.optimizer.weight_decay", 0.0))
    else:
        reading.fact("excluded", True, origin)
        if all("norm" in str(pattern) or "bias" in str(pattern) for pattern in value):
            reading.claim(origin, Always("norms and biases never decay"))
        else:
            reading.drop(origin, "weight decay always applies to matrices and embeddings, never to norms and biases")


def _stages(reading: Reading, value: Any, origin: str) -> None:
    """The first stage's data; Nanotron sorts the stages by their first steps."""
    reading.read_inside(origin)
    first, *later = sorted(value, key=lambda stage: stage["start_training_step"])
    where = origin.split("=")[0]
    for stage in later:
        reason = "a recipe has one data stage; train the next one in its own run, with checkpoint.start_from"
        reading.drop(f"{where}: {stage}", reason)
    data = first["data"]
    for key, setting in flat({key: inner for key, inner in data.items() if key != "dataset"}).items():
        if key not in ("seed", "num_loading_workers"):
            reading.drop(f"{where}: data.{key}={setting}", "unknown, or without a counterpart")
    if length := first.get("sequence_length"):
        reading.drop(f"{where}: sequence_length={length}", "data.sequence_length holds for all steps")
    if data.get("dataset"):
        _dataset(reading, data["dataset"], where)
    else:
        reading.drop(f"{where}: dataset=null", "Nanotron would train on random tokens; set data.sources to text")


PLAIN = ("hf_dataset_config_name", "hf_dataset_splits", "text_column_name")
ARRANGED = ("dataset_processing_num_proc_per_process", "dataset_overwrite_cache")


def _dataset(reading: Reading, value: Mapping[str, Any], where: str) -> None:
    names = value.get("hf_dataset_or_datasets")
    if names is None or value.get("sft_dataloader"):
        reading.drop(f"{where}: {dict(value)}", "tokens and conversations are not imported; set data.sources")
        return
    for key in value.keys() - {"hf_dataset_or_datasets", *PLAIN, *ARRANGED}:
        reading.drop(f"{where}: {key}={value[key]}", "set it under data.sources")
    splits = value.get("hf_dataset_splits") or "train"
    common = {
        "subset": value.get("hf_dataset_config_name"),
        "split": splits if isinstance(splits, str) else splits[0],
        "text_key": value.get("text_column_name"),
    }
    weights = names if isinstance(names, Mapping) else dict.fromkeys([names] if isinstance(names, str) else names)
    sources = []
    for name, weight in weights.items():
        source = {"path": place(name), **common, "weight": weight}
        defaults = {"split": "train", "text_key": "text"}
        sources.append({key: part for key, part in source.items() if part is not None and defaults.get(key) != part})
    reading.set("data.sources", sources, f"{where} hf_dataset_or_datasets={names}")


FACTORIES = ("optimizer.optimizer_factory", "optimizer")
"""Where AdamW's constants are, and where older releases have them."""
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.NAMES: {"general": "project run"},
    NoEffect.RESUMES: {"general": "step consumed_train_samples", "checkpoints": "load_lr_scheduler load_optimizer"},
    NoEffect.GUARDS: {"general": "ignore_sanity_checks"},
    NoEffect.MEMORY: {"parallelism": "tp_mode tp_recompute_allgather"},
    NoEffect.OVERLAP: {"parallelism": "tp_linear_async_communication", "model": "ddp_bucket_cap_mb"},
    NoEffect.SAVES: {"checkpoints": "checkpoints_path_is_shared_file_system save_initial_state save_final_state"},
    NoEffect.LOGS: {
        "general": "benchmark_csv_path",
        "logging": "iteration_step_info_interval log_level log_level_replica",
        "metrics_logging": "log_level log_detail_interval",
        "model.model_config": "log_attn_probs",
        "profiler": "*",
    },
    NoEffect.EVALUATES: {"tokens": "limit_test_batches", "lighteval": "*"},
    NoEffect.HUB: {"s3_upload": "*"},
    NoEffect.GENERATES: {"model.model_config": "bos_token_id eos_token_id pad_token_id use_cache"},
    NoEffect.KERNEL: {
        "model.model_config": "_attn_implementation _fused_rms_norm _fused_rotary_emb _use_qkv_packed",
        **dict.fromkeys(FACTORIES, "torch_adam_is_fused"),
    },
    NoEffect.UNREAD: {"model.model_config": "initializer_range pretraining_tp"},
    NoEffect.CLASS: {"model.model_config": "is_llama_config is_qwen2_config"},
}

RULES: Mapping[str, Rule] = {
    "general.seed": "training.seed",
    "parallelism.dp": fact("replicas"),
    "parallelism.tp": degree("layout.tp"),
    "parallelism.pp": degree("layout.pp"),
    "parallelism.context_parallel_size": degree("layout.cp"),
    "parallelism.expert_parallel_size": degree("layout.ep"),
    "parallelism.pp_engine": choice(fact("schedule"), {"1f1b": "1f1b", "afab": "afab"}),
    "parallelism.recompute_layer": when("training.recompute", "full", Has("training.recompute", "none")),
    "model.dtype": choice("training.precision", PRECISIONS.read),
    "model.init_method.std": "model.init_std",
    "model.init_method.scaling_method": lambda reading, value, origin: apply(
        only("NUM_LAYERS", "weights are initialized as by NUM_LAYERS"), reading, str(value).upper(), origin
    ),
    "model.init_method.use_mup": unsupported("muP is not supported"),
    "model.init_method.path": without(
        "export the checkpoint to Hugging Face's format, and set model.name to its folder"
    ),
    "model.make_vocab_size_divisible_by": fact("multiple"),
    f"{SIZE}hidden_size": "model.hidden",
    f"{SIZE}intermediate_size": "model.ffn",
    f"{SIZE}num_hidden_layers": "model.num_layers",
    f"{SIZE}num_attention_heads": "model.num_heads",
    f"{SIZE}num_key_value_heads": "model.num_kv_heads",
    f"{SIZE}vocab_size": "model.vocab",
    f"{SIZE}max_position_embeddings": "model.max_positions",
    f"{SIZE}rms_norm_eps": "model.norm_eps",
    f"{SIZE}rope_theta": "model.rope_theta",
    f"{SIZE}tie_word_embeddings": "model.tied_embeddings",
    f"{SIZE}attention_bias": when(fact("biases"), True, HasNot("model.family", "qwen2")),
    f"{SIZE}moe_config.*": without("set the experts under model"),
    f"{SIZE}z_loss_coefficient": without("z-loss is not supported"),
    "tokens.limit_val_batches": above_zero("training.evaluation.batches", Has("training.evaluation.batches", 0)),
    "tokenizer.tokenizer_revision": without("the tokenizer's files are read as they are"),
    "tokenizer.tokenizer_max_length": without("documents are cut where data.packing tells"),
    f"{SIZE}hidden_act": only("silu", "feed-forward layers are SwiGLU (silu)"),
    f"{SIZE}rope_scaling": unsupported("Nanotron's models ignore it"),
    f"{SIZE}rope_interleaved": unsupported("rope rotates halves of a head, not pairs: equivalent from random weights"),
    f"{SIZE}rope_seq_len_interpolation_factor": without("position interpolation is not supported"),
    f"{SIZE}no_rope_layer": unsupported("every layer uses rope"),
    f"{SIZE}z_loss_enabled": unsupported("z-loss is not supported"),
    f"{SIZE}sliding_window_size": "model.sliding_window",
    f"{SIZE}flex_attention_mask": unsupported("set data.separate_documents or model.sliding_window"),
    f"{SIZE}_use_doc_masking": when("data.separate_documents", True),
    f"{SIZE}is_starcoder2_config": unsupported("no model family has these layers; give --model"),
    "tokenizer.tokenizer_name_or_path": "data.tokenizer",
    "tokens.sequence_length": "data.sequence_length",
    "tokens.train_steps": "training.steps",
    "tokens.micro_batch_size": "training.micro_batch",
    "tokens.batch_accumulation_per_replica": fact("accumulation"),
    "tokens.val_check_interval": above_zero("training.evaluation.every", Has("training.evaluation.every", 0)),
    "optimizer.optimizer_factory.name": choice("training.optimizer.name", OPTIMIZERS.read),
    **{f"{place}.adam_beta1": fact("beta1") for place in FACTORIES},
    **{f"{place}.adam_beta2": fact("beta2") for place in FACTORIES},
    **{f"{place}.adam_eps": "training.optimizer.eps" for place in FACTORIES},
    "optimizer.zero_stage": _zero,
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "optimizer.weight_decay_exclude_named_params": _excluded,
    "optimizer.clip_grad": positive("training.clip"),
    "optimizer.accumulate_grad_in_fp32": fact("wide"),
    "optimizer.learning_rate_scheduler.learning_rate": "training.optimizer.lr",
    "optimizer.learning_rate_scheduler.lr_warmup_steps": "training.lr_schedule.warmup",
    "optimizer.learning_rate_scheduler.lr_warmup_style": fact("warmup style"),
    "optimizer.learning_rate_scheduler.lr_decay_style": fact("shape"),
    "optimizer.learning_rate_scheduler.lr_decay_steps": fact("falls over"),
    "optimizer.learning_rate_scheduler.lr_decay_starting_step": fact("falls from"),
    "optimizer.learning_rate_scheduler.min_decay_lr": fact("lowest"),
    "data_stages": _stages,
    "checkpoints.checkpoints_path": "run_dir",
    "checkpoints.checkpoint_interval": fact("saves"),
    "checkpoints.resume_checkpoint_path": without("`meshwright train --resume` continues from the newest checkpoint"),
    **no_effects(NO_EFFECT),
}

DEFAULTS = {
    "training.seed": 42,
    "training.precision": "bf16",
    "training.clip": None,
    "training.lr_schedule.warmup": 0,
    "model.hidden": 4096,
    "model.ffn": 11008,
    "model.num_layers": 32,
    "model.num_heads": 32,
    "model.vocab": 32000,
    "model.max_positions": 2048,
    "model.norm_eps": 1e-6,
    "model.rope_theta": 10000.0,
    "model.tied_embeddings": False,
}
"""Of its dataclasses."""


def is_nanotron(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of a Nanotron configuration."""
    model, layout = values.get("model"), values.get("parallelism")
    return isinstance(model, Mapping) and "model_config" in model and isinstance(layout, Mapping) and "dp" in layout


def read_nanotron(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a Nanotron configuration."""
    leaves, default = flat(values), f"{file} (Nanotron's default)"
    shown = {key: value for key, value in leaves.items() if value is not None}
    reading.take(shown, RULES, file)
    reading.default_all(DEFAULTS, default)
    if "model.name" not in reading.settings:
        reading.set("model.family", *_family(reading, file))
    _ranks(reading, default)
    _vocabulary(reading)
    _dtypes(reading, default)
    _rates(reading, default)
    _decay(reading)
    saves, where = reading.facts.get("saves", (0, ""))
    if where:
        reading.set("checkpoint.every", saves if saves < _steps(reading) else 0, where)


def _steps(reading: Reading) -> int:
    steps, where = reading.settings.get("training.steps", (None, ""))
    if steps is None:
        raise UserError("tokens.train_steps is missing; Nanotron's schedules depend on it")
    check_count(steps, where)
    return steps


def _family(reading: Reading, file: str) -> tuple[str, str]:
    """The family that has these layers; Nanotron's Qwen2 without biases is a Llama."""
    if "model.sliding_window" in reading.settings:
        return "mistral", reading.settings["model.sliding_window"][1]
    if "biases" in reading.facts:
        return "qwen2", reading.facts["biases"][1]
    return "llama", f"{file} (layers without biases)"


def _ranks(reading: Reading, default: str) -> None:
    replicas, where = reading.facts.get("replicas", (1, default))
    check_count(replicas, where)
    layout = [f"layout.{axis}" for axis in ("tp", "pp", "cp")]
    origins = [where, *(reading.settings[path][1] for path in layout if path in reading.settings)]
    reading.fact("ranks", replicas * reading.model_ranks(), "; ".join(origins))
    name, where = reading.facts.get("schedule", ("afab", default))
    if "layout.pp" in reading.settings:
        reading.set("layout.schedule", name, where)
    elif "schedule" in reading.facts:
        reading.no_effect.append((where, NoEffect.OFF))


def _vocabulary(reading: Reading) -> None:
    """The vocabulary, with the rows that Nanotron adds."""
    vocab, where = reading.settings.get("model.vocab", (None, ""))
    multiple, origin = reading.facts.get("multiple", (1, ""))
    check_count(multiple, origin)
    multiple *= reading.value("layout.tp", 1)
    if isinstance(vocab, int) and vocab > 0 and vocab % multiple:
        padded = -(-vocab // multiple) * multiple
        reading.settings["model.vocab"] = padded, f"{where}, padded to a multiple of {multiple}; {origin}"
    elif origin:
        reading.claim(origin, Has("model.vocab", vocab))


def _dtypes(reading: Reading, default: str) -> None:
    """Without accumulation in fp32, everything has the model's dtype."""
    wide, where = reading.facts.get("wide", (True, default))
    if reading.value("training.precision", "bf16") != "bf16" or wide is True:
        reading.claim(where, Has("training.reduce_dtype", "fp32"))
        return
    reading.set("training.reduce_dtype", "bf16", where)
    reading.in_bf16(where)


def _rates(reading: Reading, default: str) -> None:
    """Its schedule as one of ours: cosine or linear from the end of warm-up, or wsd."""
    steps = _steps(reading)
    peak, peak_origin = reading.settings.get("training.optimizer.lr", (None, ""))
    check_number(peak, peak_origin)
    warmup, where = reading.settings.get("training.lr_schedule.warmup", (0, default))
    check_number(warmup, where)
    style, origin = reading.facts.get("warmup style", ("linear", default))
    if style == "constant" and warmup:
        reading.settings["training.lr_schedule.warmup"] = 0, origin
    elif not warmup and "warmup style" in reading.facts:
        reading.no_effect.append((origin, NoEffect.OFF))
    elif style == "linear":
        reading.claim(origin, Always("warm-up is always linear"))
    lowest, floor = reading.facts.get("lowest", (peak, default))
    check_number(lowest, floor)
    shape, kind = reading.facts.get("shape", ("linear", default))
    over, length = reading.facts.get("falls over", (steps - warmup, default))
    start, begin = reading.facts.get("falls from", (warmup, default))
    check_number(over, length)
    check_number(start, begin)
    if lowest == peak:
        reading.set("training.lr_schedule.name", "constant", floor)
        reading.no_effect += [(one, NoEffect.OFF) for one in (kind, length, begin) if one != default]
        return
    reading.set("training.lr_schedule.final", float(f"{lowest / peak:.6g}"), f"{floor}, relative to the peak {peak}")
    if start + over != steps:
        origins = joined(length, begin)
        reading.drop(origins, f"the decay ends at step {start + over}; schedules always end at the last step, {steps}")
    else:
        reading.claim(f"{length}; {begin}", Has("training.steps", steps))
    if shape == "linear" and start > warmup:
        reading.set("training.lr_schedule.name", "wsd", f"{kind}; {begin}")
        reading.set("training.lr_schedule.decay", max(1, steps - start), f"{begin}; {length}")
    elif shape in SHAPES and start <= warmup:
        reading.set("training.lr_schedule.name", SHAPES[shape], kind)
    else:
        reason = "only linear or cosine decay from the end of warm-up, or linear decay at the end, is supported"
        reading.drop(kind, reason)


def _decay(reading: Reading) -> None:
    """Nanotron decays norms and biases too, unless a key names exceptions."""
    decay, where = reading.settings.get("training.optimizer.weight_decay", (0, ""))
    if decay and "excluded" not in reading.facts:
        reading.notes.append(f"{where}: Nanotron also decays norms and biases; Meshwright does not")
