"""Engine `deepspeed`: a loop of DeepSpeed, with its ds_config.json."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine, strategy_of
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.offload import NOTHING, OffloadSpec
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun

STAGES: Mapping[Strategy, int] = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hybrid": 3}


class DeepSpeedEngine(TemplateEngine):
    """DeepSpeed's engine under ZeRO 0 to 3, hpZ, AutoTP and offload to host memory, and its pipeline. Every
    setting is explicit: by default it clips gradients at 1.0."""

    name = "deepspeed"
    about = "a loop of DeepSpeed"
    packages: ClassVar = {"transformers": "deepspeed", "deepspeed": "deepspeed"}
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "hybrid"), "")
    axes: ClassVar[Mapping[str, str]] = {"tp": "", "pp": ""}
    numel = 'getattr(parameter, "ds_numel", parameter.numel())'

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; bf16 without ZeRO, where gradients accumulate only in bf16; what hpZ and AutoTP lack."""
        found, run = dict(super().cannot(resolved)), resolved.run
        if stage_of(run.layout) == 0 and run.training.precision == BF16.name and run.training.reduce_dtype == FP32.name:
            found["training.precision"] = (
                "without ZeRO DeepSpeed accumulates gradients of bf16 in bf16; use layout.zero"
            )
        if strategy_of(run.layout) == "hybrid" and run.layout.zero_stage != 3:
            found["layout.zero"] = f"DeepSpeed's hpZ is for zero=3, not {run.layout.zero_stage}"
        if run.layout.pp > 1:
            found |= _cannot_pipeline(resolved)
        if run.layout.tp > 1 and resolved.model.family == "gpt2":
            found["layout.tp"] = "DeepSpeed's AutoTP does not split gpt2 in training"
        return found

    def cannot_dump(self, resolved: ResolvedRun) -> str:
        """Parameters of AutoTP carry no information on how they are split, and a stage knows its own layers only."""
        layout = resolved.run.layout
        if layout.tp > 1:
            return "layout.tp: under AutoTP the program knows its parts of gradients only"
        if layout.pp > 1:
            return "layout.pp: a rank of the program knows its stage's gradients only"
        return ""

    def cannot_offload(self, layout: LayoutSpec) -> str:
        """Parameters go to the host only under ZeRO-3, and nothing without ZeRO; disks need its own asynchronous IO."""
        tiers, stage = layout.tiers, stage_of(layout)
        if tiers.activations == "host":
            return "the program keeps activations on the device"
        if tiers.optimizer == "disk":
            return "the program keeps state on the device or in host memory, not on disk"
        if tiers.optimizer_share < 1:
            return "DeepSpeed's share of the optimizer's state needs its own CPU Adam; set optimizer_share: 1"
        if not stage:
            return "DeepSpeed offloads under ZeRO only; use layout.zero"
        if tiers.parameters == "host" and stage < 3:
            return f"DeepSpeed offloads parameters under zero=3 only, not {stage}; use offload={{optimizer: host}}"
        return ""

    def template(self, resolved: ResolvedRun) -> str:
        """Pipelines have a program of their own."""
        return "deepspeed_pipeline" if resolved.run.layout.pp > 1 else self.name

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """DeepSpeed's configuration."""
        return {"ds_config.json": json.dumps(ds_config(resolved), indent=2) + "\n"}

    def words(self, resolved: ResolvedRun, program: str) -> dict[str, Any]:
        """Also the stage of ZeRO and whether state is offloaded."""
        layout = resolved.run.layout
        more = {
            "stage": stage_of(layout),
            "offload": layout.tiers != NOTHING,
        }
        return super().words(resolved, program) | more


def stage_of(layout: LayoutSpec) -> int:
    """The ZeRO stage. AutoTP and pipelines have at least stage 1, on any number of ranks: without ZeRO they report no
    norm."""
    return max(STAGES[strategy_of(layout)], int(layout.tp * layout.pp > 1))


def ds_config(resolved: ResolvedRun) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    training, layout = resolved.run.training, resolved.run.layout
    mixed = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": training.reduce_dtype},
        "communication_data_type": training.reduce_dtype,
    }
    zero: dict[str, Any] = {"stage": stage_of(layout), **_offload(layout.tiers)}
    if strategy_of(layout) == "hybrid":
        zero["zero_hpz_partition_size"] = layout.dp_shard
        zero["stage3_param_persistence_threshold"] = 0  # else small parameters stay whole, and have no second share
    split = {"tensor_parallel": {"autotp_size": layout.tp, "vocab_parallel_lm_head": False}}
    return {
        **(mixed if training.precision == BF16.name else {}),
        **({} if layout.tp > 1 else {"train_batch_size": resolved.global_batch}),  # AutoTP's check counts all ranks
        "train_micro_batch_size_per_gpu": resolved.micro_batch,
        "gradient_accumulation_steps": resolved.accumulation,
        "gradient_clipping": training.clip or 0.0,
        "zero_optimization": zero,
        **(split if layout.tp > 1 else {}),
        "zero_allow_untested_optimizer": True,
        **({"zero_force_ds_cpu_optimizer": False} if layout.tiers != NOTHING else {}),
        "steps_per_print": 1_000_000,
    }


def _offload(tiers: OffloadSpec) -> dict[str, Any]:
    """The state that ZeRO keeps in host memory."""
    kept = {"offload_optimizer": tiers.optimizer, "offload_param": tiers.parameters}
    return {key: {"device": "cpu"} for key, where in kept.items() if where == "host"}


def _cannot_pipeline(resolved: ResolvedRun) -> dict[str, str]:
    """Settings that the program of a pipeline cannot express."""
    found, layout, model = dict[str, str](), resolved.run.layout, resolved.model
    if model.family != "llama":
        found["model.family"] = "the program for deepspeed's pipeline supports llama only"
    if model.tied_embeddings:
        found["model.tied_embeddings"] = "the program's first and last stage have a matrix each"
    if layout.schedule != "1f1b":
        found["layout.schedule"] = "DeepSpeed's pipeline has 1f1b alone"
    if layout.virtual_stages > 1:
        found["layout.stages_per_rank"] = "DeepSpeed's pipeline has one stage a rank"
    if layout.tp > 1:
        found["layout.tp"] = "DeepSpeed's pipeline splits no matrices"
    if layout.data_parallel > 1:
        axis = "dp_shard" if layout.dp_shard > 1 else "dp_replicate"
        found[f"layout.{axis}"] = "the program for deepspeed's pipeline has one pipeline, no replicas"
    if layout.tiers != NOTHING:
        found["layout.offload"] = "the program for deepspeed's pipeline keeps everything on the device"
    if resolved.run.training.precision != FP32.name:
        found["training.precision"] = "the program for deepspeed's pipeline computes in fp32"
    if resolved.run.training.compile:
        found["training.compile"] = "the program for deepspeed's pipeline is not compiled"
    return found
