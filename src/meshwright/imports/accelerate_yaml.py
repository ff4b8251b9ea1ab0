"""Accelerate's YAML configuration, as `accelerate config` writes it."""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_fp8 import RULES as FP8_RULES
from meshwright.imports.accelerate_fp8 import give_up_fp8, settle_fp8
from meshwright.imports.accelerate_megatron import RULES as MEGATRON_RULES
from meshwright.imports.accelerate_megatron import settle_megatron
from meshwright.imports.deepspeed import folder, offload, settle_offload
from meshwright.imports.deepspeed_schedules import keep_named
from meshwright.imports.reading import (
    Reading,
    Rule,
    apply,
    check_count,
    degree,
    fact,
    flat,
    nothing,
    positive,
    sections,
    when,
    words,
)
from meshwright.spec.errors import UserError

SHARDING = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
PRECISION = "Accelerate's precision"
LAUNCH = "set by torchrun, Slurm or Meshwright's launcher (docs/clusters.md)"


def _type(reading: Reading, value: Any, origin: str) -> None:
    if value in ("MULTI_GPU", "MULTI_CPU", "NO", False):
        reading.fact("zero", 0, origin)
    elif value not in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        reading.give_up(origin, "supported: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM")


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    word = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard"}.get(str(value), str(value).lower())
    if word in SHARDING:
        reading.fact("zero", SHARDING[word], origin)
        if word.startswith("hybrid_shard"):
            reading.fact("hybrid", True, origin)
    else:
        reading.give_up(origin, f"supported: {', '.join(SHARDING)}")


def _reshard(reading: Reading, value: Any, origin: str) -> None:
    if isinstance(value, bool):
        reading.fact("zero", 3 if value else 2, origin)
    else:
        _sharding(reading, value, origin)


def _precision(reading: Reading, value: Any, origin: str) -> None:
    """The precision, and the fact that it is Accelerate's; YAML reads `no` as false."""
    word = str(value).lower()
    if word in PRECISIONS:
        reading.fact(PRECISION, PRECISIONS[word], origin)
    apply(words("training.precision", PRECISIONS), reading, value, origin)


def _offload(reading: Reading, value: Any, origin: str) -> None:
    if value in (True, "cpu"):
        reading.set("layout.offload", "cpu", origin)
    elif value not in (False, "none"):
        reading.give_up(origin, "supported: cpu, none")


def compile_with(reading: Reading, value: Any, origin: str) -> None:
    """Dynamo's backend; YAML reads `no` as false."""
    if str(value).lower() == "inductor":
        reading.set("training.compile", True, origin)
    elif str(value).lower() not in ("no", "false"):
        reading.give_up(origin, "supported: inductor, no")


def compile_in_mode(reading: Reading, value: Any, origin: str) -> None:
    """The mode of compilation."""
    if value == "max-autotune-no-cudagraphs":
        reading.set("training.compile_mode", value, origin)
    elif value != "default":
        reading.give_up(origin, "supported: default, max-autotune-no-cudagraphs (training.compile_mode)")


FSDP = "Meshwright always shards block by block and prefetches"
PARALLEL = "parallelism_config.parallelism_config_"
KEYS: Mapping[str, Rule] = {
    "compute_environment": lambda reading, value, origin: None,
    "debug": nothing("the watchdog is always on"),
    "distributed_type": _type,
    "num_processes": fact("ranks"),
    "num_machines": nothing(LAUNCH),
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "same_network"), nothing(LAUNCH)),
    **dict.fromkeys(("main_training_function", "rdzv_backend", "gpu_ids", "downcast_bf16"), nothing(LAUNCH)),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo", "tpu_env", "enable_cpu_affinity"), nothing(LAUNCH)),
    "mixed_precision": _precision,
    **{f"fp8_config.fp8_{key}": rule for key, rule in FP8_RULES.items()},
    **dict.fromkeys(("dynamo_backend", "dynamo_config.dynamo_backend"), compile_with),
    "dynamo_config.dynamo_mode": compile_in_mode,
    "dynamo_config.dynamo_use_regional_compilation": when("training.compile_scope", "block"),
    "dynamo_config.dynamo_use_fullgraph": nothing("a graph may break"),
    "dynamo_config.dynamo_use_dynamic": nothing("shapes never change within a run"),
    f"{PARALLEL}dp_replicate_size": lambda reading, value, origin: check_count(value, origin),
    f"{PARALLEL}dp_shard_size": lambda reading, value, origin: check_count(value, origin),
    f"{PARALLEL}tp_size": degree("layout.tp"),
    f"{PARALLEL}cp_size": degree("layout.cp"),
    f"{PARALLEL}sp_size": degree("layout.cp", {"layout.cp_method": "ulysses"}),
    f"{PARALLEL}cp_comm_strategy": words("layout.cp_method", {"allgather": "all_gather", "alltoall": "ring"}),
    f"{PARALLEL}cp_backend": lambda reading, value, origin: None,  # there is one
    f"{PARALLEL}sp_backend": lambda reading, value, origin: None,
    f"{PARALLEL}sp_attn_implementation": nothing("training.attention chooses the kernel"),
    f"{PARALLEL}sp_seq_length": nothing("set data.sequence_length"),
    f"{PARALLEL}sp_seq_length_is_variable": nothing("samples have data.sequence_length tokens"),
    "use_cpu": lambda reading, value, origin: reading.set("device", "cpu", origin) if value is True else None,
    "gradient_accumulation_steps": fact("accumulation"),
    "fsdp_config.fsdp_version": lambda reading, value, origin: None,
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_offload_params": _offload,
    "fsdp_config.fsdp_activation_checkpointing": lambda reading, value, origin: (
        reading.set("training.recompute", "full", origin) if value is True else None
    ),
    "fsdp_config.fsdp_state_dict_type": nothing("checkpoints are always sharded, and load under any layout"),
    **{
        f"fsdp_config.fsdp_{key}": nothing(FSDP)
        for key in (
            *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "forward_prefetch"),
            *("use_orig_params", "cpu_ram_efficient_loading", "sync_module_states", "min_num_params"),
        )
    },
    **MEGATRON_RULES,
    "deepspeed_config.zero_stage": fact("zero"),
    "deepspeed_config.gradient_accumulation_steps": fact("accumulation"),
    "deepspeed_config.gradient_clipping": positive("training.clip"),
    "deepspeed_config.offload_optimizer_device": offload("optimizer"),
    "deepspeed_config.offload_param_device": offload("parameters"),
    "deepspeed_config.offload_optimizer_nvme_path": folder,
    "deepspeed_config.offload_param_nvme_path": folder,
    "deepspeed_config.deepspeed_moe_layer_cls_names": nothing("Meshwright always shards block by block"),
    **{
        f"deepspeed_config.deepspeed_{key}": nothing(LAUNCH)
        for key in ("hostfile", "exclusion_filter", "inclusion_filter")
    },
    "deepspeed_config.zero3_init_flag": nothing("each rank always initializes only its shard"),
    "deepspeed_config.zero3_save_16bit_model": nothing("`meshwright export` writes whole weights"),
    "deepspeed_config.deepspeed_multinode_launcher": nothing(LAUNCH),
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
        return
    origin, machines, processes = reading.facts["hybrid"][1], values.get("num_machines", 1), values.get("num_processes")
    if isinstance(processes, int) and isinstance(machines, int) and machines > 0 and processes % machines == 0:
        reading.fact("shard", processes // machines, f"{origin}; num_machines={machines}")
    else:
        reading.give_up(
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
    if product == 1:
        return
    processes = values.get("num_processes")
    if isinstance(processes, int) and product != processes and sizes["sp"] == 1:
        said = " x ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"{file}: parallelism_config: {said} is not num_processes={processes}; make them equal")
    if sizes["sp"] == 1:
        keys = [f"{PARALLEL}{name}_size" for name in ("dp_shard", "dp_replicate")]
        said = [f"{file}: {key}={given[inner]}" for key in keys if (inner := key.partition(".")[2]) in given]
        reading.fact("shard", sizes["dp_shard"], "; ".join(said) or f"{file} (Accelerate's default: dp_shard_size=1)")


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
