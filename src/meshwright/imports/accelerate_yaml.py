"""Accelerate's YAML configuration, as `accelerate config` writes it."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, fact, flat, nothing, positive, words

SHARDING = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
LAUNCH = "set by torchrun, Slurm or Meshwright's launcher (docs/clusters.md)"


def _type(reading: Reading, value: Any, origin: str) -> None:
    if value in ("MULTI_GPU", "MULTI_CPU", "NO", False):
        reading.fact("zero", 0, origin)
    elif value not in ("FSDP", "DEEPSPEED"):
        reading.give_up(origin, "supported: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED")


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


def _offload(reading: Reading, value: Any, origin: str) -> None:
    if value in (True, "cpu"):
        reading.set("layout.offload", "cpu", origin)
    elif value not in (False, "none"):
        reading.give_up(origin, "supported: cpu, none")


FSDP = "Meshwright always shards block by block and prefetches"
RULES: Mapping[str, Rule] = {
    "compute_environment": lambda reading, value, origin: None,
    "debug": nothing("the watchdog is always on"),
    "distributed_type": _type,
    "num_processes": fact("ranks"),
    "num_machines": nothing(LAUNCH),
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "same_network"), nothing(LAUNCH)),
    **dict.fromkeys(("main_training_function", "rdzv_backend", "gpu_ids", "downcast_bf16"), nothing(LAUNCH)),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo", "tpu_env", "enable_cpu_affinity"), nothing(LAUNCH)),
    "mixed_precision": words("training.precision", {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}),
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
    "deepspeed_config.zero_stage": fact("zero"),
    "deepspeed_config.gradient_accumulation_steps": fact("accumulation"),
    "deepspeed_config.gradient_clipping": positive("training.clip"),
    "deepspeed_config.offload_optimizer_device": _offload,
    "deepspeed_config.offload_param_device": _offload,
    "deepspeed_config.zero3_init_flag": nothing("each rank always initializes only its shard"),
    "deepspeed_config.zero3_save_16bit_model": nothing("`meshwright export` writes whole weights"),
    "deepspeed_config.deepspeed_multinode_launcher": nothing(LAUNCH),
    "deepspeed_config.deepspeed_config_file": lambda reading, value, origin: reading.notes.append(
        f"{origin}: pass that file too"
    ),
}


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


def read_accelerate(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an Accelerate configuration."""
    reading.take(flat(values), RULES, file)
    _settle_hybrid(reading, values)
    if values.get("distributed_type") == "FSDP" and "zero" not in reading.facts:
        reading.fact("zero", 3, f"{file}: distributed_type=FSDP")
