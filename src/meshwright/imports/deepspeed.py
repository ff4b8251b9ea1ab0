"""DeepSpeed's JSON configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.deepspeed_schedules import (
    CYCLES,
    DECOUPLED,
    MUON_LR,
    OPTIMIZERS,
    PEAK,
    RATE,
    READ,
    SCHEDULES,
    TORCH_ADAM,
    cycle_rules,
    keep_least,
    keep_named,
    keep_rate,
    name_of,
    settle_optimizer,
    settle_schedule,
)
from meshwright.imports.reading import Form, Reading, Rule, check_number, flat, joined
from meshwright.imports.rules import (
    by_sign,
    cases,
    fact,
    in_turn,
    listed,
    no_effects,
    no_tracker,
    only,
    positive,
    sections,
    sets,
    tracker,
    unsupported,
    when,
    without,
    words,
)
from meshwright.imports.schedules import schedule_words

SWITCHES = {"cpu_offload": "optimizer", "cpu_offload_param": "parameters", "cpu_offload_params": "parameters"}
"""Older keys -> what they move to the host."""
PLACES = {"cpu": "host", "nvme": "disk"}
PARTS = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
"""Sections of a configuration -> what of a rank's state they move."""
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.MEMORY: {
        "zero_optimization": "cpu_offload_use_pin_memory",
        **{f"zero_optimization.{section}": "pin_memory buffer_count buffer_size max_in_cpu fast_init pipeline_read "
           "pipeline_write pipeline" for section in PARTS},
        "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events",
        "activation_checkpointing": "partition_activations contiguous_memory_optimization "
        "synchronize_checkpoint_boundary number_checkpoints",
    },
    NoEffect.OVERLAP: {
        "zero_optimization": "overlap_comm contiguous_gradients reduce_bucket_size allgather_bucket_size "
        "reduce_scatter allgather_partitions stage3_prefetch_bucket_size stage3_max_live_parameters sub_group_size "
        "stage3_max_reuse_distance stage3_param_persistence_threshold round_robin_gradients",
    },
    NoEffect.KERNEL: {"": "zero_force_ds_cpu_optimizer"},
    NoEffect.LOGS: {"": "steps_per_print wall_clock_breakdown dump_state", "activation_checkpointing": "profile",
                    "wandb": "project group team", "tensorboard": "output_path job_name"},
    NoEffect.GUARDS: {"": "zero_allow_untested_optimizer"},
    NoEffect.SAVES: {"zero_optimization": "stage3_gather_16bit_weights_on_model_save"},
}  # fmt: skip
LOSS_SCALE = "loss_scale_window initial_scale_power hysteresis min_loss_scale consecutive_hysteresis"
"""Of fp16's dynamic loss scale."""


def offload(part: str) -> Rule:
    """Keeps where a part of the state is, and on disk its folder, for `settle_offload`."""
    places: dict[str, Rule] = {theirs: fact(f"offloaded {part}", ours) for theirs, ours in PLACES.items()}
    return cases({**places, "none": Has(f"layout.offload.{part}", "device")})


def folder(reading: Reading, value: Any, origin: str) -> None:
    """Keeps the folder of state on disk."""
    if value == "none":
        reading.claim(origin, Always("no folder is named"))
    elif reading.known("offload folder", str(value)) == str(value):
        reading.fact("offload folder", str(value), origin)
    else:
        reading.drop(origin, "all state is in one folder, the optimizer's")


def settle_offload(reading: Reading) -> None:
    """Set the recipe's offloading: its parameters are outside the device only beside the optimizer's state."""
    kept = {part: reading.facts[f"offloaded {part}"] for part in PARTS.values() if f"offloaded {part}" in reading.facts}
    if not kept:
        return
    origin = "; ".join(where for _, where in kept.values())
    tiers: dict[str, Any] = {part: place for part, (place, _) in kept.items()}
    if tiers.get("parameters") == "disk" and tiers.get("optimizer") != "disk":
        _, place = reading.facts.pop("offload folder", ("", ""))
        reason = "parameters can be on disk only if the optimizer state is too; see layout.offload"
        reading.drop(joined(kept["parameters"][1], place), reason)
        tiers["parameters"] = "host"
    if "parameters" in tiers and "optimizer" not in tiers:
        reading.notes.append(
            f"{kept['parameters'][1]}: offloaded parameters are updated on the host, so the optimizer state is "
            "there too"
        )
        tiers["optimizer"] = "host"
    if "offloaded share" in reading.facts:
        share, where = reading.facts["offloaded share"]
        if tiers.get("parameters") == tiers["optimizer"]:
            reading.drop(where, "if parameters are offloaded, so is the whole optimizer state")
        else:
            tiers, origin = tiers | {"optimizer_share": share}, f"{origin}; {where}"
    if "offload folder" in reading.facts:
        place, where = reading.facts["offload folder"]
        if tiers["optimizer"] == "disk":
            tiers, origin = tiers | {"directory": place}, f"{origin}; {where}"
        else:
            reading.drop(where, "no state is on disk")
    whole = tiers == {"optimizer": "host", "parameters": "host"}
    reading.set("layout.offload", "cpu" if whole else tiers, origin)


HYBRID = "imported as hybrid sharding, which shards optimizer state over dp_shard ranks; hpZ shards it over all ranks"
WHOLE = Always("the whole state of the optimizer is in one place")
ONE_COPY = Has("layout.dp_replicate", 1)


def _settle_quantized(reading: Reading) -> None:
    """ZeRO++'s formats, where ranks share what is sent."""
    stage = reading.known("zero", 0)
    for name, path, kind, least in (
        ("quantized weights", "layout.quantized_weights", "int8", 3),
        ("quantized gradients", "layout.quantized_gradients", "int4", 2),
    ):
        if name not in reading.facts:
            continue
        origin = reading.facts[name][1]
        if stage < least:
            reading.drop(origin, f"ZeRO-{stage} has no such communication")
        else:
            reading.set(path, kind, origin)
    if "error feedback" in reading.facts:
        origin = reading.facts["error feedback"][1]
        if "layout.quantized_gradients" in reading.settings:
            reading.set("layout.gradient_error_feedback", True, origin)
            reading.notes.append(
                f"{origin}: imported as error feedback, which adds the whole last error; LoCo adds a moving average "
                "(err_beta), which it resets (reset_T)"
            )
        else:
            reading.drop(origin, "without zero_quantized_gradients, no gradient is rounded")


LOCO = fact("error feedback", True, check_number)
"""LoCo's two constants: error feedback for quantized gradients."""
MUON_RULES: Mapping[str, Rule] = {
    "optimizer.params.muon_lr": MUON_LR,
    "optimizer.params.momentum": "training.optimizer.muon_momentum",
}
KEYS: Mapping[str, Rule] = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": fact("accumulation"),
    "gradient_clipping": positive("training.clip"),
    "optimizer.type": words("training.optimizer.name", OPTIMIZERS),
    "optimizer.params.lr": keep_rate(RATE),
    "optimizer.params.betas": listed("training.optimizer.betas"),
    "optimizer.params.eps": "training.optimizer.eps",
    "optimizer.params.weight_decay": "training.optimizer.weight_decay",
    "optimizer.params.adam_w_mode": fact(DECOUPLED),
    "optimizer.params.torch_adam": fact(TORCH_ADAM),
    "scheduler.type": schedule_words(SCHEDULES | CYCLES),
    "scheduler.params.warmup_num_steps": "training.lr_schedule.warmup",
    "scheduler.params.total_num_steps": "training.steps",
    "scheduler.params.warmup_max_lr": keep_rate(PEAK),
    "scheduler.params.warmup_min_lr": Form(keep_least, even_auto=True),
    "scheduler.params.warmup_type": only("linear", "warm-up is always linear"),
    "scheduler.params.last_batch_iteration": only(-1, "a new run starts at its first step"),
    "scheduler.params.warmup_min_ratio": only(0, "warm-up always starts at 0"),
    "scheduler.params.cos_min_ratio": "training.lr_schedule.final",
    "bf16.enabled": when("training.precision", "bf16"),
    "fp16.enabled": when("training.precision", "fp16"),
    "fp16.auto_cast": without("training.precision sets the compute dtype"),
    "fp16.loss_scale": only(0, "fp16's loss scale is dynamic"),
    **{f"fp16.{key}": without("fp16's loss scale is dynamic, with fixed constants") for key in LOSS_SCALE.split()},
    "communication_data_type": words("training.reduce_dtype", {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"}),
    "data_types.grad_accum_dtype": words("training.reduce_dtype", {"fp32": "fp32", "bf16": "bf16"}),
    "zero_optimization.stage": fact("zero"),
    **{f"zero_optimization.{section}.device": offload(part) for section, part in PARTS.items()},
    **{f"zero_optimization.{section}.nvme_path": folder for section in PARTS},
    "zero_optimization.offload_optimizer.ratio": cases({(1, 1.0): WHOLE}, fact("offloaded share")),
    **{
        f"zero_optimization.{key}": when(fact(f"offloaded {part}"), "host", Has(f"layout.offload.{part}", "device"))
        for key, part in SWITCHES.items()
    },
    "zero_optimization.zero_hpz_partition_size": cases({1: ONE_COPY}, in_turn(fact("shard"), sets({}, HYBRID))),
    "zero_optimization.mics_shard_size": by_sign(fact("shard"), ONE_COPY),
    "zero_optimization.zero_quantized_weights": when(
        fact("quantized weights"), True, Has("layout.quantized_weights", "none")
    ),
    "zero_optimization.zero_quantized_gradients": when(
        fact("quantized gradients"), True, Has("layout.quantized_gradients", "none")
    ),
    "zero_optimization.zeropp_loco_param.err_beta": LOCO,
    "zero_optimization.zeropp_loco_param.reset_T": LOCO,
    "zero_optimization.zero_quantized_nontrainable_weights": unsupported("set finetune.base=int8 or nf4"),
    "activation_checkpointing.cpu_checkpointing": unsupported("set layout.offload={activations: host}"),
    "tensorboard.enabled": when(tracker("tensorboard"), True, no_tracker("tensorboard")),
    "wandb.enabled": when(tracker("wandb"), True, no_tracker("wandb")),
    "tensor_parallel.autotp_size": "layout.tp",
    "prescale_gradients": unsupported("gradients are reduced in training.reduce_dtype"),
    **no_effects(NO_EFFECT),
}
RULES: Mapping[str, Rule] = {**KEYS, **sections(KEYS)}


def read_named(reading: Reading, value: Any, origin: str) -> None:
    """Read the value of the Trainer's key `deepspeed`: a file's name, or the configuration itself."""
    if isinstance(value, Mapping):
        reading.read_inside(origin)
        read_deepspeed(reading, value, origin.partition("=")[0])
    else:
        keep_named(reading, value, origin)


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a DeepSpeed configuration."""
    marks = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping")
    return any(key in values for key in marks) and "compute_environment" not in values


def read_deepspeed(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a DeepSpeed configuration."""
    reading.facts.setdefault(READ, (file, file))
    keys = flat(values)
    is_muon = str(keys.get("optimizer.type")).lower() == "muon"
    rules = {**RULES, **cycle_rules(name_of(values)), **(MUON_RULES if is_muon else {})}
    if keys.get("fp16.enabled") in (None, False):
        rules |= {f"fp16.{key}": NoEffect.OFF for key in f"auto_cast loss_scale {LOSS_SCALE}".split()}
    reading.take(keys, rules, file)
    settle_offload(reading)
    _settle_quantized(reading)
    settle_optimizer(reading, values, file)
    settle_schedule(reading, values, file)
    reading.default("training.precision", "fp32", f"{file} (neither bf16 nor fp16 is enabled)")
    if "gradient_clipping" not in values:
        reading.set("training.clip", 1.0, f"{file} (DeepSpeed 0.19's default)")
        reading.notes.append(
            f"{file} has no gradient_clipping: DeepSpeed 0.19 then clips at 1.0, earlier releases do not clip; the "
            "recipe clips at 1.0"
        )
