"""The keys of torchtitan's configuration."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.names import DTYPES, Names, pipelined
from meshwright.imports.reading import Reading, Rule, joined
from meshwright.imports.rules import (
    above_zero,
    both,
    cases,
    choice,
    degree,
    either,
    fact,
    if_so,
    lower,
    no_effects,
    no_tracker,
    one_of,
    only,
    positive,
    sets,
    tracker,
    unsupported,
    when,
    without,
    words,
)
from meshwright.imports.schedules import schedule_words
from meshwright.imports.titan_python import CALLED

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
PIPELINES = Names(
    "layout.schedule",
    {
        "1f1b": "1F1B",
        "afab": "GPipe",
        "interleaved-1f1b": "Interleaved1F1B",
        "interleaved-zero-bubble": "InterleavedZeroBubble",
        "zbv": "ZBVZeroBubble",
        "looped-bfs": "LoopedBFS",
        "dualpipev": "DualPipeV",
    },
    counts=pipelined,
)
BY_WORD = {theirs.lower(): ours for theirs, ours in PIPELINES.read.items()}
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
CONVERTERS = {"nvfp4": "nvfp4", "mx": "mxfp8", "float8": "fp8"}
"""A part of a converter's name -> the precision of the products that it makes."""
LORA = {"rank": "finetune.rank", "alpha": "finetune.alpha"}
FUSED = {"wkv": ("wk", "wv"), "wqkv": ("wq", "wk", "wv")}


def _degree(name: str) -> Rule:
    if "." in name:
        return degree(name)
    rule = cases({-1: fact("all shard", True)}, fact(name)) if name == "shard" else fact(name)
    return both(rule, lambda get: get(f"layout.dp_{name}"))


_pipeline = cases({theirs: fact("schedule", ours) for theirs, ours in BY_WORD.items()}, word=lower)
CODE = "this dataset is defined in torchtitan's code; set data.sources"
read_data_set = cases({"c4": sets({"data.sources": [{"path": "hub:allenai/c4", "subset": "en"}]})}, CODE)


def _table(reading: Reading, value: Any, origin: str) -> None:
    name, where = reading.facts.get("data set", (next(iter(value)), origin))
    if name in value:
        reading.set("data.sources", [value[name]], joined(where, origin))
    else:
        read_data_set(reading, name, where)


def _stages(reading: Reading, value: Any, origin: str) -> None:
    layers = [sum(str(name).startswith("layers.") for name in part) for part in value]
    reading.set("layout.stage_layers", layers, origin)


def _converters(reading: Reading, value: Any, origin: str) -> None:
    for given in value if isinstance(value, list) else [value]:
        words = given if isinstance(given, Mapping) else {}
        name = str(words.get(CALLED, given)).lower()
        if precisions := [ours for theirs, ours in CONVERTERS.items() if theirs in name]:
            reading.set("training.precision", precisions[0], origin)
        elif "lora" in name:
            reading.set("finetune.method", "lora", origin)
            reading.set_all({ours: words[key] for key, ours in LORA.items() if key in words}, origin)
            targets = [part for target in words.get("target_modules", ()) for part in FUSED.get(target, (target,))]
            reading.set("finetune.targets", targets or "all-linear", origin)
        elif given:
            reading.drop(origin, f"supported: {', '.join(CONVERTERS)}, lora")
    if not value:
        reading.claim(origin, Always("no layer is converted"))


def _named_data(reading: Reading, value: Any, origin: str) -> None:
    """A data set of torchtitan's table, by its name or as `DATASETS['name']`."""
    match = re.fullmatch(r"DATASETS\[['\"](.*)['\"]\]", str(value))
    reading.fact("data set", match[1] if match else value, origin)


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LOGS: {
        "job": "print_args print_config",
        "metrics": "log_freq disable_color_printing enable_color_printing save_tb_folder rank_0_only "
        "save_for_all_ranks",
        "model": "print_after_conversion",
        "debug": "print_config save_config_file enable_structured_logging",
    },
    NoEffect.NAMES: {"job": "description"},
    NoEffect.MEMORY: {
        "training": "gc_freq gc_debug disable_cuda_graphs",
        "activation_checkpoint": "early_stop per_op_sac_force_recompute_mm_shapes_by_fqns preserve_rng_state",
        "parallelism": "enable_sequence_parallel",
    },
    NoEffect.KERNEL: {
        "optimizer": "fused foreach implementation",
        "parallelism": "enable_compiled_autograd disable_loss_parallel enable_loss_parallel spmd_backend",
        "compile": "components backend",
        "model": "tp_gemm_backend",
    },
    NoEffect.OVERLAP: {
        "parallelism": "enable_async_tensor_parallel context_parallel_load_balancer enable_fsdp_symm_mem "
        "context_parallel_ptrr_mask_key",
        "compile": "enable_async_tensor_parallel",
    },
    NoEffect.READS: {
        "dataset": "num_workers pin_memory persistent_workers prefetch_factor num_prefetch_batches read_options"
    },
    NoEffect.GUARDS: {
        "comm": "mode init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
        "save_traces_file_prefix",
        "debug": "spmd_typechecking detect_anomaly deterministic_warn_only",
        "job": "use_for_integration_test",
    },
    NoEffect.SAVES: {
        "checkpoint": "last_save_model_only last_save_model_weights_only last_save_in_hf export_dtype folder "
        "enable_first_step_checkpoint create_seed_checkpoint"
    },
    NoEffect.RESUMES: {"checkpoint": "exclude_from_loading load_step"},
}
ASSETS, IN_HF, TOKENS, MICROBATCHES = "assets", "starts from Hugging Face", "microbatch tokens", "pipeline microbatches"
ALL_KEPT = Has("checkpoint.keep_last", None)
PYTHON: Mapping[str, Rule] = {
    "dump_folder": "run_dir",
    "hf_assets_path": fact(ASSETS),
    "loss": one_of(("CrossEntropyLoss.Config", "cross_entropy_loss"), "the loss is always cross-entropy"),
    "tokenizer.*": NoEffect.TOKENIZER,
    "model.attn_backend": one_of(
        ("flex", "flex_flash", "varlen"), "attention is masked between documents only with flex or varlen"
    ),
    "model.scaling_factor": fact("rope factor"),
    "optimizer.undecayed": Always("norms and biases never decay"),
    "dataset.dataset": _named_data,
    "dataset.dataset.()": choice(
        "data.packing", {"ConcatThenSplitPackingConfig": "concatenated", "FirstFitPackingConfig": "best_fit"}
    ),
    "dataset.dataset.dataset": _named_data,
    "dataset.dataset.num_packing_bins": without("samples are packed best-fit, over all documents"),
    "dataset.dataset_path": fact("data path"),
    "dataset.table": _table,
    "dataset.infinite": only(True, "data is always repeated"),
    "dataset.repeat": only(True, "data is always repeated"),
    "dataset.shuffle": either("data.order", "shuffled", "given"),
    "dataset.seed": without("training.seed also shuffles the data"),
    "training.dtype": words("training.master_dtype", {"bfloat16": "bf16", "float32": "fp32"}),
    "training.max_context_length": "data.sequence_length",
    "training.num_tokens_per_microbatch_per_dp_rank": fact(TOKENS),
    "training.num_tokens_per_train_step": above_zero(
        "training.global_batch_tokens", Always("every rank's microbatch is one of the step's")
    ),
    "lr_scheduler.total_steps": fact("decay end"),
    "parallelism.module_fqns_per_model_part": _stages,
    "parallelism.num_pp_microbatches": fact(MICROBATCHES),
    "checkpoint.initial_load_in_hf": fact(IN_HF),
    "checkpoint.initial_load_model_only": only(True, "checkpoint.start_from loads only weights"),
    "debug.seed": "training.seed",
    "debug.deterministic": when("training.deterministic", True),
    "debug.moe_force_load_balance": unsupported("the router always chooses"),
    "profiler.*": NoEffect.LOGS,
}
"""Keys of the configuration in Python that others do not have."""
RULES: Mapping[str, Rule] = {
    **PYTHON,
    "job.dump_folder": "run_dir",
    "model.name": fact("model"),
    "model.flavor": fact("flavor"),
    "model.norm_type": only("rmsnorm", "these models have RMSNorm"),
    "model.tokenizer_path": "data.tokenizer",
    "model.hf_assets_path": fact(ASSETS),
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
    "training.global_batch_size": above_zero(
        "training.global_batch", Always("every rank's batch is one of the step's")
    ),
    "training.seq_len": "data.sequence_length",
    "training.warmup_steps": "training.lr_schedule.warmup",
    "training.max_norm": positive("training.clip"),
    "training.steps": "training.steps",
    "training.dataset": read_data_set,
    "training.dataset_path": lambda reading, value, origin: reading.set("data.sources", [{"path": value}], origin),
    "training.seed": "training.seed",
    "training.deterministic": when("training.deterministic", True),
    "training.compile": when("training.compile", True),
    "compile.enable": when("training.compile", True),
    "training.mixed_precision_param": fact("compute"),
    "training.mixed_precision_reduce": words("training.reduce_dtype", DTYPES),
    "training.enable_cpu_offload": when("layout.offload", "cpu", Has("layout.offload", "none")),
    **{f"{part}.{key}": _degree(path) for part in ("training", "parallelism") for key, path in DEGREES.items()},
    **{f"{part}.data_parallel_shard_degree": _degree("shard") for part in ("training", "parallelism")},
    "training.data_parallel_degree": _degree("shard"),
    "experimental.pipeline_parallel_degree": _degree("layout.pp"),
    "experimental.context_parallel_degree": _degree("layout.cp"),
    "experimental.pipeline_parallel_schedule": _pipeline,
    "parallelism.pipeline_parallel_schedule": _pipeline,
    "parallelism.pipeline_parallel_microbatch_size": without("without a pipeline it has no effect"),
    "parallelism.pipeline_parallel_layers_per_stage": without("set layout.stage_layers"),
    **dict.fromkeys(
        [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")],
        without("set layout.stage_layers"),
    ),
    "parallelism.fsdp_reshard_after_forward": cases(
        {"default": Always("weights are gathered again as torchtitan does by default"), "never": fact("zero", 2)},
        fact("zero", 3),
    ),
    "parallelism.expert_tensor_parallel_degree": only(1, "tensor parallelism does not split experts"),
    "parallelism.context_parallel_rotate_method": choice(
        "layout.cp_method", {"allgather": "all_gather", "alltoall": "ring"}
    ),
    "checkpoint.enable": fact("saves"),
    "checkpoint.enable_checkpoint": fact("saves"),
    "checkpoint.interval": fact("save interval"),
    "checkpoint.interval_type": only("steps", "intervals are in steps"),
    "checkpoint.keep_latest_k": above_zero("checkpoint.keep_last", ALL_KEPT),
    "checkpoint.async_mode": cases(
        {"disabled": sets({"checkpoint.asynchronous": False})}, sets({"checkpoint.asynchronous": True})
    ),
    "checkpoint.initial_load_path": "checkpoint.start_from",
    "checkpoint.model_weights_only": without("checkpoints hold the optimizer's state; the last one, too"),
    "checkpoint.load_only": unsupported("checkpoint.every sets when checkpoints are saved"),
    **dict.fromkeys(
        (
            "job.config_file",
            "job.custom_config_module",
            "experimental.custom_import",
            "experimental.custom_args_module",
        ),
        unsupported("no code is run, and settings that it makes are missing"),
    ),
    "optimizer.early_step_in_backward": unsupported("the optimizer steps once all gradients are known"),
    "activation_checkpoint.mode": choice(
        "training.recompute", {"none": "none", "selective": "selective", "full": "full"}
    ),
    "activation_checkpoint.selective_ac_option": only("op", "set training.recompute to {full: LAYERS} instead"),
    "validation.enable": if_so(
        without("evaluation data are a share of the training data; set data.held_out"),
        Has("training.evaluation.every", 0),
    ),
    "validation.freq": "training.evaluation.every",
    "validation.steps": above_zero("training.evaluation.batches", Always("the held-out data are read once")),
    **{f"metrics.enable_{name}": when(tracker(name), True, no_tracker(name)) for name in ("tensorboard", "wandb")},
    "float8.enable_float8_linear": when("training.precision", "fp8"),
    "profiling.*": NoEffect.LOGS,
    "fault_tolerance.enable": unsupported("replicas that come and go are not supported"),
    "memory_estimation.enable": unsupported("it estimates instead of training; use `meshwright plan`"),
    **no_effects(NO_EFFECT),
}
