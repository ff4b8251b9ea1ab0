"""Accelerate's section for Megatron-LM (`megatron_lm_config`): Megatron's flags under other names."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.megatron_combined import recomputation
from meshwright.imports.reading import Reading, Rule, apply, degree, fact, nothing, positive

SECTION = "megatron_lm_config"
PREFIX = f"{SECTION}.megatron_lm_"


def _if_true(flag: str) -> Rule:
    """The meaning of Megatron-LM's switch of this name, where it is on."""
    return lambda reading, value, origin: apply(FLAGS[flag], reading, value, origin) if value is True else None


def _offload(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.set("layout.offload", {"optimizer": "host"}, origin)


KEYS: Mapping[str, Rule] = {
    "tp_degree": degree("layout.tp"),
    "pp_degree": degree("layout.pp"),
    "context_parallel_size": degree("layout.cp"),
    "expert_model_parallel_size": degree("layout.ep"),
    "expert_tensor_parallel_size": lambda reading, value, origin: (
        None if value == 1 else reading.give_up(origin, "experts are not split")
    ),
    "sequence_parallelism": lambda reading, value, origin: None,  # always with tp
    "num_micro_batches": fact("accumulation"),
    "gradient_clipping": positive("training.clip"),
    "recompute_activations": _if_true("recompute-activations"),
    "recompute_granularity": FLAGS["recompute-granularity"],
    "recompute_method": FLAGS["recompute-method"],
    "recompute_num_layers": FLAGS["recompute-num-layers"],
    "use_distributed_optimizer": _if_true("use-distributed-optimizer"),
    "use_custom_fsdp": nothing("set layout.zero, the stage of sharding"),
    "optimizer_cpu_offload": _offload,
    "overlap_cpu_optimizer_d2h_h2d": nothing("transfers always overlap the step"),
    "use_precision_aware_optimizer": nothing("set training.optimizer.name=adamw_8bit for one byte per moment"),
    "decoder_last_pipeline_num_layers": nothing("set layout.stage_layers"),
    "num_layers_per_virtual_pipeline_stage": FLAGS["num-layers-per-virtual-pipeline-stage"],
    "pipeline_model_parallel_split_rank": nothing("models have no encoder beside the decoder"),
    "attention_dropout": FLAGS["attention-dropout"],
    "hidden_dropout": FLAGS["hidden-dropout"],
    "eod_mask_loss": FLAGS["eod-mask-loss"],
    "attention_backend": nothing("training.attention chooses the kernel"),
    "attention_softmax_in_fp32": FLAGS["attention-softmax-in-fp32"],
    "calculate_per_token_loss": lambda reading, value, origin: (
        None if value is True else reading.give_up(origin, "the loss is always a mean over all tokens of a batch")
    ),
    "use_rotary_position_embeddings": lambda reading, value, origin: None,  # the model's configuration says it
    "no_load_optim": FLAGS["load"],
    "no_save_optim": nothing("checkpoints always hold the optimizer's state"),
}
"""Keys of the section, without its prefix."""
RULES: Mapping[str, Rule] = {f"{PREFIX}{key}": rule for key, rule in KEYS.items()}


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
