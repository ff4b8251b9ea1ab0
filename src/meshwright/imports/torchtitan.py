"""torchtitan's configuration: Python since 0.3, TOML before, or the JSON that it prints of its dataclasses."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, check_count, flat
from meshwright.imports.rules import above_zero, choice, dotted, fact, ignored, nothing, only, positive, when, words
from meshwright.imports.schedules import schedule_words
from meshwright.imports.titan_python import read_titan_python
from meshwright.spec.errors import UserError

FLAVORS = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("llama3", "1b"): "llama-3.2-1b",
    ("llama3", "3b"): "llama-3.2-3b",
    ("llama2", "7b"): "llama-2-7b",
    ("llama2", "13b"): "llama-2-13b",
    ("llama2", "70b"): "llama-2-70b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
}
"""A model's name and flavor -> a published name."""
SCALED = ("1B", "3B")
"""Flavors whose rope torchtitan scales by 8; the published models' is scaled by 32."""
DEGREES = {
    "data_parallel_replicate_degree": "replicate",
    "tensor_parallel_degree": "layout.tp",
    "pipeline_parallel_degree": "layout.pp",
    "context_parallel_degree": "layout.cp",
    "expert_parallel_degree": "layout.ep",
}
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "afab",
    "interleaved1f1b": "interleaved-1f1b",
    "interleavedzerobubble": "interleaved-zero-bubble",
    "zbvzerobubble": "zbv",
    "loopedbfs": "looped-bfs",
    "dualpipev": "dualpipev",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
WARMUP = "training.lr_schedule.warmup"
DEFAULTS = {
    "training.optimizer.lr": 8e-4,
    "training.optimizer.betas": [0.9, 0.95],
    "training.optimizer.weight_decay": 0.1,
    "training.lr_schedule.name": "linear",
    "training.lr_schedule.final": 0.0,
    WARMUP: 200,
    "training.steps": 10000,
    "training.micro_batch": 8,
    "data.sequence_length": 2048,
}


def _degree(name: str) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value == -1 and name == "shard":
            return reading.fact("all shard", True, origin)
        check_count(value, origin)
        if "." in name:
            return reading.set(name, value, origin) if value > 1 else None
        return reading.fact(name, value, origin)

    return rule


def _pipeline(reading: Reading, value: Any, origin: str) -> None:
    word = str(value).lower()
    if word in SCHEDULES:
        reading.fact("schedule", SCHEDULES[word], origin)
    else:
        reading.give_up(origin, f"supported: {', '.join(SCHEDULES)}")


def _data(reading: Reading, value: Any, origin: str) -> None:
    known = {"c4": {"path": "hub:allenai/c4", "subset": "en"}}
    if value in known:
        reading.set("data.sources", [known[value]], origin)
    else:
        reading.give_up(origin, "this dataset is defined in torchtitan's code; set data.sources")


def _table(reading: Reading, value: Any, origin: str) -> None:
    name, where = reading.facts.get("data set", (next(iter(value)), origin))
    if name in value:
        reading.set("data.sources", [value[name]], f"{where.partition(': ')[0]}: DATASETS['{name}']")
    else:
        _data(reading, name, where)


def _stages(reading: Reading, value: Any, origin: str) -> None:
    layers = [sum(str(name).startswith("layers.") for name in part) for part in value]
    reading.set("layout.stage_layers", layers, origin)


def _converters(reading: Reading, value: Any, origin: str) -> None:
    for name in value if isinstance(value, list) else [value]:
        if "mx" in str(name):
            reading.set("training.precision", "mxfp8", origin)
        elif "float8" in str(name):
            reading.set("training.precision", "fp8", origin)
        elif name:
            reading.give_up(origin, "supported: float8, mx")


LEFT_TO_US = {
    "job": "description print_args print_config use_for_integration_test config_file custom_config_module",
    "metrics": "log_freq disable_color_printing save_tb_folder rank_0_only enable_color_printing save_for_all_ranks",
    "training": "gc_freq gc_debug",
    "optimizer": "fused foreach implementation early_step_in_backward",
    "parallelism": "enable_async_tensor_parallel enable_compiled_autograd disable_loss_parallel enable_loss_parallel",
    "experimental": "custom_import custom_args_module",
    "model": "print_after_conversion",
    "checkpoint": "last_save_model_only last_save_model_weights_only export_dtype folder create_seed_checkpoint "
    "exclude_from_loading",
    "comm": "mode init_timeout_seconds train_timeout_seconds trace_buf_size",
    "compile": "components",
    "activation_checkpoint": "early_stop per_op_sac_force_recompute_mm_shapes_by_fqns",
}

PYTHON: Mapping[str, Rule] = {
    "dump_folder": "run_dir",
    "hf_assets_path": "data.tokenizer",
    "tokenizer": nothing("the tokenizer's own files are read"),
    "model.attn_backend": when("data.separate_documents", True),
    "model.tp_gemm_backend": nothing("PyTorch multiplies"),
    "model.scaling_factor": fact("rope factor"),
    "optimizer.undecayed": ignored,  # never are
    "dataset.dataset": fact("data set"),
    "dataset.dataset_path": fact("data path"),
    "dataset.table": _table,
    "dataset.infinite": nothing("data is always repeated"),
    **{f"dataset.{key}": nothing("Meshwright decides it")
       for key in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")},
    "training.dtype": words("training.master_dtype", {"bfloat16": "bf16", "float32": "fp32"}),
    "training.disable_cuda_graphs": nothing("CUDA graphs are not supported"),
    "lr_scheduler.total_steps": fact("decay end"),
    "parallelism.module_fqns_per_model_part": _stages,
    "parallelism.enable_sequence_parallel": ignored,  # always with tp
    "parallelism.context_parallel_load_balancer": nothing("sequences are always distributed evenly"),
    "parallelism.spmd_backend": nothing("Meshwright decides it"),
    "checkpoint.initial_load_in_hf": fact("starts from Hugging Face"),
    "checkpoint.initial_load_model_only": nothing("checkpoint.start_from loads only weights"),
    "compile.backend": nothing("Meshwright decides it"),
    "debug.seed": "training.seed",
    "debug.deterministic": when("training.deterministic", True),
    **{f"debug.{key}": nothing("Meshwright decides it")
       for key in ("print_config", "save_config_file", "enable_structured_logging", "moe_force_load_balance")},
}  # fmt: skip
"""Keys of the configuration in Python that others do not have."""
RULES: Mapping[str, Rule] = {
    **PYTHON,
    "job.dump_folder": "run_dir",
    "model.name": fact("model"),
    "model.flavor": fact("flavor"),
    "model.norm_type": nothing("the model family determines the norm"),
    "model.tokenizer_path": "data.tokenizer",
    "model.hf_assets_path": "data.tokenizer",
    "model.converters": _converters,
    "optimizer.name": words("training.optimizer.name", {"adamw": "adamw", "adam": "adamw"}),
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.eps": "training.optimizer.eps",
    "optimizer.beta1": fact("beta1"),
    "optimizer.beta2": fact("beta2"),
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "lr_scheduler.warmup_steps": "training.lr_schedule.warmup",
    "lr_scheduler.decay_type": schedule_words({"linear": "linear", "cosine": "cosine"}),
    "lr_scheduler.decay_ratio": fact("decay_ratio"),
    "lr_scheduler.lr_min": "training.lr_schedule.final",
    "lr_scheduler.min_lr_factor": "training.lr_schedule.final",
    "training.local_batch_size": "training.micro_batch",
    "training.batch_size": "training.micro_batch",
    "training.global_batch_size": above_zero("training.global_batch"),
    "training.seq_len": "data.sequence_length",
    "training.warmup_steps": "training.lr_schedule.warmup",
    "training.max_norm": positive("training.clip"),
    "training.steps": "training.steps",
    "training.dataset": _data,
    "training.dataset_path": lambda reading, value, origin: reading.set("data.sources", [{"path": value}], origin),
    "training.seed": "training.seed",
    "training.deterministic": when("training.deterministic", True),
    "training.compile": when("training.compile", True),
    "compile.enable": when("training.compile", True),
    "training.mixed_precision_param": fact("compute"),
    "training.mixed_precision_reduce": words("training.reduce_dtype", DTYPES),
    "training.enable_cpu_offload": when("layout.offload", "cpu"),
    **{f"{part}.{key}": _degree(path) for part in ("training", "parallelism") for key, path in DEGREES.items()},
    **{f"{part}.data_parallel_shard_degree": _degree("shard") for part in ("training", "parallelism")},
    "training.data_parallel_degree": _degree("shard"),
    "experimental.pipeline_parallel_degree": _degree("layout.pp"),
    "experimental.context_parallel_degree": _degree("layout.cp"),
    "experimental.pipeline_parallel_schedule": _pipeline,
    "parallelism.pipeline_parallel_schedule": _pipeline,
    "parallelism.pipeline_parallel_microbatch_size": nothing(
        "training.micro_batch is a stage's number of sequences per microbatch"
    ),
    "parallelism.pipeline_parallel_layers_per_stage": nothing("set layout.stage_layers"),
    "parallelism.fsdp_reshard_after_forward": lambda reading, value, origin: (
        reading.fact("zero", 2 if value == "never" else 3, origin) if value != "default" else None
    ),
    "parallelism.expert_tensor_parallel_degree": lambda reading, value, origin: (
        reading.give_up(origin, "tensor parallelism does not split experts") if value > 1 else None
    ),
    "parallelism.context_parallel_rotate_method": lambda reading, value, origin: reading.set(
        "layout.cp_method", "all_gather" if value == "allgather" else "ring", origin
    ),
    "checkpoint.enable": fact("saves"),
    "checkpoint.enable_checkpoint": fact("saves"),
    "checkpoint.interval": fact("save interval"),
    "checkpoint.interval_type": only("steps", "intervals are in steps"),
    "checkpoint.keep_latest_k": above_zero("checkpoint.keep_last"),
    "checkpoint.async_mode": lambda reading, value, origin: reading.set(
        "checkpoint.asynchronous", value != "disabled", origin
    ),
    "checkpoint.initial_load_path": "checkpoint.start_from",
    "checkpoint.model_weights_only": nothing("checkpoint.start_from loads only weights"),
    "activation_checkpoint.mode": choice(
        "training.recompute", {"none": "none", "selective": "selective", "full": "full"}
    ),
    "activation_checkpoint.selective_ac_option": only("op", "set training.recompute to {full: LAYERS} instead"),
    "validation.enable": nothing("evaluation is always on; set data.held_out and training.evaluation"),
    "validation.freq": "training.evaluation.every",
    "validation.steps": "training.evaluation.batches",
    "metrics.enable_tensorboard": fact("tensorboard"),
    "metrics.enable_wandb": fact("wandb"),
    "float8.enable_float8_linear": when("training.precision", "fp8"),
    **dict.fromkeys(dotted(LEFT_TO_US), nothing("it does not affect training, or Meshwright decides it")),
}


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of a torchtitan configuration."""
    sections = [name for name in ("job", "training", "parallelism", "lr_scheduler", "activation_checkpoint", "metrics")
                if isinstance(values.get(name), Mapping)]  # fmt: skip
    return "training" in sections and len(sections) > 1


def read_torchtitan(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a torchtitan configuration."""
    found = flat(values)
    off = {key: value for key, value in found.items() if _switched_off(values, key)}
    reading.seen += [f"{file}: {key}={value}" for key, value in off.items()]
    _take(reading, {key: value for key, value in found.items() if key not in off}, file)


def read_torchtitan_python(reading: Reading, text: str, file: str) -> None:
    """Read a torchtitan configuration in Python; it keeps documents apart."""
    found = read_titan_python(text, file)
    if not found.get("validation.enable"):
        found = {key: value for key, value in found.items() if not key.startswith(("validation.", "profiler."))}
    last = ("dataset.table",)  # names are looked up in it
    _take(reading, dict(sorted(found.items(), key=lambda pair: pair[0] in last)), file)
    if "data set" in reading.facts and "dataset.table" not in found:
        _data(reading, *reading.facts["data set"])
    reading.default("data.separate_documents", True, f"{file} (torchtitan masks attention between documents)")


def _in_microbatches(reading: Reading, found: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Read a pipeline's microbatch, one sequence by default, and return the other keys; all keys without a pipeline."""
    if found.get("parallelism.pipeline_parallel_degree", 1) == 1:
        return dict(found)
    key, name = "training.local_batch_size", "pipeline_parallel_microbatch_size"
    rest = {other: value for other, value in found.items() if other != f"parallelism.{name}"}
    local, micro = found.get(key, 8), found.get(f"parallelism.{name}", 1)
    check_count(local, f"{file}: {key}={local}")
    check_count(micro, f"{file}: {name}={micro}")
    reading.set("training.micro_batch", micro, f"{file}: {name}={micro}")
    if found.get("training.global_batch_size", -1) == -1:  # else the accumulation follows from it
        reading.fact("accumulation", max(1, local // micro), f"{file}: {key}={local}")
    return {other: value for other, value in rest.items() if other != key}


def _take(reading: Reading, found: Mapping[str, Any], file: str) -> None:
    reading.take(_in_microbatches(reading, found, file), RULES, file)
    if "training.steps" in reading.settings:
        steps, origin = reading.settings["training.steps"]
        check_count(steps, origin)
        reading.default(WARMUP, min(steps, DEFAULTS[WARMUP]), f"{file} (torchtitan's default, at most all steps)")
    for path, value in DEFAULTS.items():
        if path == "training.micro_batch" and path not in reading.settings:  # the global batch is worked out of it
            reading.set(path, value, f"{file} (torchtitan's default)")
        elif path != "training.optimizer.betas" or not ({"beta1", "beta2"} & reading.facts.keys()):
            reading.default(path, value, f"{file} (torchtitan's default)")
    _model(reading)
    _decay(reading)
    _ranks(reading, file)
    compute, origin = reading.facts.get("compute", ("bfloat16", f"{file} (torchtitan's default)"))
    if "training.precision" not in reading.settings:
        if str(compute) not in DTYPES:
            raise UserError(f"{origin}: must be one of {', '.join(DTYPES)}")
        reading.set("training.precision", DTYPES[str(compute)], origin)
    trackers = [name for name in ("tensorboard", "wandb") if reading.known(name) is True]
    if trackers:
        reading.set("trackers", trackers, "; ".join(reading.facts[name][1] for name in trackers))
    steps = reading.settings.get("training.steps", (DEFAULTS["training.steps"], ""))[0]
    if reading.known("saves") is True and (every := reading.facts.get("save interval", (500, file))):
        reading.set("checkpoint.every", every[0] if every[0] < steps else 0, every[1])
    if reading.known("starts from Hugging Face") is True and "checkpoint.start_from" in reading.settings:
        reading.settings["model.name"] = reading.settings.pop("checkpoint.start_from")
    if "schedule" in reading.facts and "layout.pp" in reading.settings:
        reading.set("layout.schedule", *reading.facts["schedule"])


def _switched_off(values: Mapping[str, Any], key: str) -> bool:
    """Whether a key only configures something that is off: profiling, or validation."""
    section, _, name = key.partition(".")
    if section in ("profiling", "memory_estimation", "fault_tolerance", "debug"):
        return not any(value is True for value in values[section].values()) if values[section] else True
    return section == "validation" and not values[section].get("enable") and name != "enable"


def _model(reading: Reading) -> None:
    name, origin = reading.facts.get("model", (None, ""))
    flavor, why = reading.facts.get("flavor", ("", ""))
    found = FLAVORS.get((str(name).lower(), str(flavor).lower()))
    if found and "model.name" not in reading.settings:
        reading.set("model.name", found, f"{origin}; {why}")
        factor, said = reading.facts.get("rope factor", (8.0, why))
        if str(flavor) in SCALED and factor != 32.0:
            reading.set("model.rope_scaling", {"factor": factor}, f"{said}: torchtitan's factor is {factor}")
    elif name is not None and not found:
        said = f"{origin}; {why}" if why else origin
        reading.give_up(said, "this size is defined in torchtitan's code; give --model")


def _decay(reading: Reading) -> None:
    """The rate is flat between warm-up and a last part that is `decay_ratio` of all steps."""
    if reading.settings.get("training.lr_schedule.final", (0, ""))[0] == 1:
        _, origin = reading.settings.pop("training.lr_schedule.final")
        reading.settings["training.lr_schedule.name"] = "constant", origin
        return
    steps = reading.settings.get("training.steps", (DEFAULTS["training.steps"], ""))[0]
    end, where = reading.facts.get("decay end", (steps, ""))
    check_count(end, where)
    if not steps - 1 <= end <= steps:
        reading.give_up(where, "schedules always end at the last step")
    if "decay_ratio" not in reading.facts:
        return
    ratio, origin = reading.facts["decay_ratio"]
    kind = reading.settings.get("training.lr_schedule.name", ("linear", ""))[0]
    if kind == "linear":
        reading.settings.pop("training.lr_schedule.name", None)
        reading.set("training.lr_schedule.name", "wsd", origin)
        reading.set("training.lr_schedule.decay", max(1, round(float(ratio) * end)), origin)
    else:
        reading.give_up(origin, "a cosine always decays from the end of warm-up")


def _ranks(reading: Reading, file: str) -> None:
    """Of how many ranks: where every degree is given, their product; FSDP is over all that no other axis takes."""
    replicate, origin = reading.facts.get("replicate", (1, ""))
    shard, where = reading.facts.get("shard", (None, f"{file} (torchtitan's default: data_parallel_shard_degree=-1)"))
    if shard is None:  # all that are left
        reading.replicate(replicate, origin)
    else:
        reading.fact(
            "ranks", replicate * shard * reading.model_ranks(), "; ".join(part for part in (origin, where) if part)
        )
    if (shard is None or shard > 1) and "zero" not in reading.facts:
        stages = reading.settings.get("layout.pp", (1, ""))[0]  # in a pipeline, weights stay gathered by default
        reading.fact("zero", 2 if stages > 1 else 3, reading.facts.get("all shard", (None, where))[1])
    elif shard == 1 and "layout.cp" in reading.settings:  # FSDP is over the ranks that share a sequence, too
        reading.facts.setdefault("zero", (3, reading.settings["layout.cp"][1]))
    elif shard == 1 and "zero" in reading.facts:
        del reading.facts["zero"]  # nothing is sharded that could be gathered
