"""Accelerate's YAML configuration, as `accelerate config` writes it."""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_fp8 import FP8_RULES, give_up_fp8, settle_fp8
from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.deepspeed import folder, offload, settle_offload
from meshwright.imports.deepspeed_schedules import keep_named
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.megatron_combined import recomputation
from meshwright.imports.reading import Reading, Rule, check_count, flat
from meshwright.imports.rules import (
    apply,
    cases,
    claims_value,
    degree,
    fact,
    flags_of,
    lower,
    no_effects,
    only,
    positive,
    same,
    sections,
    sets,
    unsupported,
    when,
    without,
    words,
)
from meshwright.spec.errors import UserError

SECTION = "megatron_lm_config"
PREFIX = f"{SECTION}.megatron_lm_"
OF_FLAGS = (
    "recompute_granularity recompute_method recompute_num_layers num_layers_per_virtual_pipeline_stage "
    "attention_dropout hidden_dropout eod_mask_loss attention_softmax_in_fp32 calculate_per_token_loss no_load_optim "
    "attention_backend"
)
"""Keys that are Megatron-LM's flags."""
MEGATRON_KEYS: Mapping[str, Rule] = {
    "tp_degree": degree("layout.tp"),
    "pp_degree": degree("layout.pp"),
    "context_parallel_size": degree("layout.cp"),
    "expert_model_parallel_size": degree("layout.ep"),
    **same(FLAGS, flags_of({"": OF_FLAGS})),
    "expert_tensor_parallel_size": only(1, "experts are not split"),
    "sequence_parallelism": NoEffect.MEMORY,
    "num_micro_batches": fact("accumulation"),
    "gradient_clipping": positive("training.clip"),
    "recompute_activations": when("training.recompute", "selective"),
    "use_distributed_optimizer": when(FLAGS["use-distributed-optimizer"], True, HasNot("layout.zero", 1)),
    "use_custom_fsdp": unsupported("set layout.zero, the stage of sharding"),
    "optimizer_cpu_offload": when("layout.offload", {"optimizer": "host"}, Has("layout.offload", "none")),
    "overlap_cpu_optimizer_d2h_h2d": NoEffect.OVERLAP,
    "use_precision_aware_optimizer": unsupported("set training.optimizer.name=adamw_8bit for one byte per moment"),
    "decoder_last_pipeline_num_layers": unsupported("set layout.stage_layers"),
    "pipeline_model_parallel_split_rank": unsupported("models have no encoder beside the decoder"),
    "use_rotary_position_embeddings": without("the model's config.json tells its positions"),
    "no_save_optim": unsupported("checkpoints always hold the optimizer's state"),
}
"""Keys of the section, without its prefix."""
MEGATRON_RULES: Mapping[str, Rule] = {f"{PREFIX}{key}": rule for key, rule in MEGATRON_KEYS.items()}


def settle_megatron(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Accelerate's defaults of the section, and what several of its keys say together."""
    if values.get("distributed_type") != "MEGATRON_LM":
        return
    section = values.get(SECTION)
    given = {str(key).removeprefix("megatron_lm_") for key in section} if isinstance(section, Mapping) else set()
    if "gradient_clipping" not in given:
        reading.set("training.clip", 1.0, f"{file} (Accelerate's default: gradient_clipping=1.0)")
    recomputation(reading)
    for key, taken, ours in (
        ("context_parallel_size", "2", "layout.cp"),
        ("recompute_granularity", "full", "training.recompute"),
    ):
        if key not in given:
            reading.notes.append(
                f"{file} has no {PREFIX}{key}: Accelerate 1.15 then takes {taken}, releases without this key do not; "
                f"set {ours} if yours does"
            )


SHARDING = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
PRECISION = "Accelerate's precision"
DEGREES = "the number of processes is the product of the degrees"


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    word = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard"}.get(str(value), str(value).lower())
    if word in SHARDING:
        reading.fact("zero", SHARDING[word], origin)
        if word.startswith("hybrid_shard"):
            reading.fact("hybrid", True, origin)
    else:
        reading.drop(origin, f"supported: {', '.join(SHARDING)}")


def _precision(reading: Reading, value: Any, origin: str) -> None:
    """The precision, and the fact that it is Accelerate's; YAML reads `no` as false."""
    word = str(value).lower()
    if word in PRECISIONS:
        reading.fact(PRECISION, PRECISIONS[word], origin)
    apply(words("training.precision", PRECISIONS), reading, value, origin)


COMPILED = Always("the unit of compilation changes no result")
BACKEND = cases(
    {"inductor": sets({"training.compile": True}), ("no", "false"): Has("training.compile", False)},
    "supported: inductor, no",
    lower,
)
"""Dynamo's backend."""
MODE = cases(
    {
        "max-autotune-no-cudagraphs": "training.compile_mode",
        "default": Has("training.compile_mode", "default"),
    },
    "supported: default, max-autotune-no-cudagraphs (training.compile_mode)",
)
"""The mode of compilation."""
OFF = Always("1 switches it off")
"""Of one of the two degrees of context parallelism, of which the other may be above 1."""


PARALLEL = "parallelism_config.parallelism_config_"
BLOCKS = "Meshwright always shards block by block"
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LAUNCH: {
        "": "compute_environment machine_rank main_process_ip main_process_port same_network "
        "main_training_function rdzv_backend gpu_ids tpu_use_cluster tpu_use_sudo tpu_env enable_cpu_affinity "
        "ipex_config mpirun_config",
        "deepspeed_config": "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter "
        "deepspeed_multinode_launcher",
    },
    NoEffect.GUARDS: {"": "debug"},
    NoEffect.KERNEL: {
        "dynamo_config": "dynamo_use_fullgraph dynamo_use_dynamic",
        "parallelism_config": "parallelism_config_sp_attn_implementation parallelism_config_cp_backend "
        "parallelism_config_sp_backend",
        "fsdp_config": "fsdp_use_orig_params",
    },
    NoEffect.MEMORY: {
        "fsdp_config": "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states",
        "deepspeed_config": "zero3_init_flag",
    },
    NoEffect.OVERLAP: {
        "fsdp_config": "fsdp_version fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch "
        "fsdp_forward_prefetch fsdp_min_num_params",
    },
    NoEffect.SAVES: {"fsdp_config": "fsdp_state_dict_type", "deepspeed_config": "zero3_save_16bit_model"},
}
KEYS: Mapping[str, Rule] = {
    **no_effects(NO_EFFECT),
    "distributed_type": cases(
        {
            ("MULTI_GPU", "MULTI_CPU", "NO", False): fact("zero", 0),
            ("FSDP", "DEEPSPEED"): HasNot("layout.zero", "auto"),
            "MEGATRON_LM": Always("its section tells the layout"),
        },
        "supported: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM",
    ),
    "num_processes": fact("ranks"),
    "num_machines": fact("machines"),
    "downcast_bf16": unsupported("only TPUs have it"),
    "mixed_precision": _precision,
    **{f"fp8_config.fp8_{key}": rule for key, rule in FP8_RULES.items()},
    **dict.fromkeys(("dynamo_backend", "dynamo_config.dynamo_backend"), BACKEND),
    "dynamo_config.dynamo_mode": MODE,
    "dynamo_config.dynamo_use_regional_compilation": when("training.compile_scope", "block", COMPILED),
    f"{PARALLEL}dp_replicate_size": fact("parallel dp_replicate", check=check_count),
    f"{PARALLEL}dp_shard_size": fact("parallel dp_shard", check=check_count),
    f"{PARALLEL}tp_size": degree("layout.tp"),
    f"{PARALLEL}cp_size": degree("layout.cp", one=OFF),
    f"{PARALLEL}sp_size": degree("layout.cp", {"layout.cp_method": "ulysses"}, OFF),
    f"{PARALLEL}cp_comm_strategy": words("layout.cp_method", {"allgather": "all_gather", "alltoall": "ring"}),
    f"{PARALLEL}sp_seq_length": claims_value("data.sequence_length"),
    f"{PARALLEL}sp_seq_length_is_variable": unsupported("samples have data.sequence_length tokens"),
    "use_cpu": when("device", "cpu"),
    "gradient_accumulation_steps": fact("accumulation"),
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": cases({True: fact("zero", 3), False: fact("zero", 2)}, _sharding),
    "fsdp_config.fsdp_offload_params": cases(
        {(True, "cpu"): sets({"layout.offload": "cpu"}), (False, "none"): Has("layout.offload", "none")},
        "supported: cpu, none",
    ),
    "fsdp_config.fsdp_activation_checkpointing": when("training.recompute", "full", Has("training.recompute", "none")),
    **MEGATRON_RULES,
    "deepspeed_config.zero_stage": fact("zero"),
    "deepspeed_config.gradient_accumulation_steps": fact("accumulation"),
    "deepspeed_config.gradient_clipping": positive("training.clip"),
    "deepspeed_config.offload_optimizer_device": offload("optimizer"),
    "deepspeed_config.offload_param_device": offload("parameters"),
    "deepspeed_config.offload_optimizer_nvme_path": folder,
    "deepspeed_config.offload_param_nvme_path": folder,
    "deepspeed_config.deepspeed_moe_layer_cls_names": without(BLOCKS),
    "deepspeed_config.deepspeed_config_file": keep_named,
}
SHORT = ("fsdp", "fp8", "dynamo", "megatron_lm")
"""Sections whose keys may omit the section's prefix."""


def _short(key: str) -> str:
    """A key without its section's prefix."""
    section, _, name = key.partition(".")
    prefix = section.removesuffix("_config")
    return f"{section}.{name.removeprefix(f'{prefix}_')}" if prefix in SHORT else key


RULES: Mapping[str, Rule] = {**{_short(key): rule for key, rule in KEYS.items()}, **KEYS, **sections(KEYS)}


def is_accelerate(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an Accelerate configuration."""
    return "compute_environment" in values or ("distributed_type" in values and "num_processes" in values)


def _settle_hybrid(reading: Reading, values: Mapping[str, Any]) -> None:
    """Hybrid sharding, whose groups are the processes of a machine."""
    if "hybrid" not in reading.facts:
        reading.ignore("machines", reason=NoEffect.LAUNCH)
        return
    origin, machines, processes = reading.facts["hybrid"][1], values.get("num_machines", 1), values.get("num_processes")
    if isinstance(processes, int) and isinstance(machines, int) and machines > 0 and processes % machines == 0:
        machines_origin = reading.facts.get("machines", (1, "num_machines=1"))[1]
        reading.fact("shard", processes // machines, f"{origin}; {machines_origin}")
    else:
        reading.drop(
            origin, f"{machines} machines do not divide {processes} processes; the recipe shards over all ranks"
        )


def _settle_parallelism(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """The ranks that share a copy, of which Accelerate has one by default.

    Raises `UserError` if the degrees do not multiply to the number of processes, which Accelerate refuses too.
    """
    given = values.get("parallelism_config")
    if not isinstance(given, Mapping):
        return
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: given.get(f"parallelism_config_{name}_size") or 1 for name in names}
    for name, size in sizes.items():
        check_count(size, f"{file}: {PARALLEL}{name}_size={size}")
    product = math.prod(sizes.values())
    for name in names[:2]:
        if sizes[name] == 1 and (axis := f"parallel {name}") in reading.facts:
            alone = Always("degrees of 1 leave the ranks to distributed_type")
            reading.claim(reading.facts[axis][1], alone if product == 1 else Has(f"layout.{name}", 1))
    if product == 1:
        return
    processes = values.get("num_processes")
    if isinstance(processes, int) and product != processes and sizes["sp"] == 1:
        degrees = " x ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"{file}: parallelism_config: {degrees} is not num_processes={processes}; make them equal")
    if sizes["sp"] == 1:
        keys = [f"{PARALLEL}{name}_size" for name in ("dp_shard", "dp_replicate")]
        origins = [f"{file}: {key}={given[inner]}" for key in keys if (inner := key.partition(".")[2]) in given]
        default = f"{file} (Accelerate's default: dp_shard_size=1)"
        reading.fact("shard", sizes["dp_shard"], "; ".join(origins) or default)


def _settle_deepspeed(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """The section for DeepSpeed, with the stage that Accelerate takes by default."""
    section = values.get("deepspeed_config")
    if isinstance(section, Mapping) and any(str(key).startswith("offload") for key in section):
        settle_offload(reading)
    named = isinstance(section, Mapping) and section.get("deepspeed_config_file")
    if values.get("distributed_type") == "DEEPSPEED" and "zero" not in reading.facts and not named:
        reading.fact("zero", 2, f"{file} (Accelerate's default: zero_stage=2)")


def read_accelerate(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an Accelerate configuration."""
    reading.take(flat(values), RULES, file)
    _settle_hybrid(reading, values)
    _settle_parallelism(reading, values, file)
    _settle_deepspeed(reading, values, file)
    settle_megatron(reading, values, file)
    precision = str(values.get("mixed_precision", "no")).lower()
    if precision == "fp8" and reading.settings["training.precision"][0] == "fp8":
        settle_fp8(reading, f"{file}: mixed_precision=fp8")
    else:
        give_up_fp8(reading)
    if "mixed_precision" not in values:
        reading.default("training.precision", "fp32", f"{file} (Accelerate's default: mixed_precision=no)")
    if precision in ("bf16", "fp8") and values.get("distributed_type") == "FSDP":
        reading.notes.append(
            f"{file}: FSDP reduces gradients in bf16 under mixed_precision={precision}, a recipe in fp32; set "
            "training.reduce_dtype=bf16 for the same"
        )
    if values.get("distributed_type") == "FSDP" and "zero" not in reading.facts:
        reading.fact("zero", 3, f"{file}: distributed_type=FSDP")
