"""Engine `deepspeed`: a loop of DeepSpeed, with its ds_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, assert_never

from meshwright.engines.engine import Strategy, TemplateEngine, refused_axes, refused_data, strategy_of
from meshwright.engines.settings import Rule, only
from meshwright.launch.programs import NoStepError, ProgramError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.offload import NOTHING, OffloadSpec
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun

STAGES: Mapping[Strategy, int] = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hybrid": 3}

SWAPPED, BUFFERS = 2**20, 16
"""Elements that are stepped together when state is on disk, and buffers of that size in memory: a group's weights,
gradients and two moments, while the next is read and the last is written."""
AIO = {"block_size": 2**20, "queue_depth": 16, "single_submit": False, "overlap_events": True}
"""Asynchronous reads and writes; tensors below `block_size` bytes stay in memory."""

ULYSSES = ("llama", "qwen2", "qwen3")
"""Families whose attention it replaces without loss: it drops masks, so windows would be lost in silence."""


class DeepSpeedEngine(TemplateEngine):
    """DeepSpeed's engine under ZeRO 0 to 3, hpZ, AutoTP, Ulysses and offload to host memory and disk, and its pipeline.
    Every setting is explicit: by default it clips gradients at 1.0."""

    name = "deepspeed"
    about = "a loop of DeepSpeed"
    packages: ClassVar = {"transformers": "deepspeed", "deepspeed": "deepspeed"}
    strategies = ("ddp", "zero1", "zero2", "zero3", "hybrid")
    axes = ("tp", "pp", "cp")
    rules: ClassVar[Mapping[str, Rule]] = {
        "layout.quantized_weights": only("none", "int8", reason="DeepSpeed's qwZ gathers int8"),
        "layout.quantized_gradients": only("none", "int4", reason="DeepSpeed's qgZ reduces int4"),
        "layout.gradient_error_feedback": only(False, reason="DeepSpeed 0.19 has removed LoCo (zeropp_loco_param)"),
    }

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; also bf16 without ZeRO (gradients accumulate in bf16), and limits of hpZ and AutoTP."""
        refusals, run = dict(super().cannot(resolved)), resolved.run
        if stage_of(run.layout) == 0 and run.training.precision == BF16.name and run.training.reduce_dtype == FP32.name:
            refusals["training.precision"] = (
                "without ZeRO, DeepSpeed accumulates bf16 gradients in bf16; set layout.zero"
            )
        if strategy_of(run.layout) == "hybrid" and run.layout.zero_stage != 3:
            refusals["layout.zero"] = f"DeepSpeed supports hpZ only with layout.zero=3, not {run.layout.zero_stage}"
        if words := _zero_plus_plus(run.layout):
            if run.layout.zero_stage != 3 or run.layout.tp * run.layout.pp * run.layout.cp > 1:
                refusals["layout.zero"] = (
                    f"DeepSpeed supports {' and '.join(words)} only with layout.zero=3 and data parallelism alone"
                )
            elif run.device == "cpu":
                refusals["device"] = f"{NEEDS_GPU}; use device=auto"
        if run.layout.pp > 1:
            refusals |= _cannot_pipeline(resolved)
        if run.layout.cp > 1:
            refusals |= _cannot_split_samples(resolved)
        if run.layout.tp > 1 and resolved.model.family == "gpt2":
            refusals["layout.tp"] = "DeepSpeed's AutoTP does not support training gpt2"
        return refusals

    def cannot_dump(self, resolved: ResolvedRun) -> str:
        """AutoTP's parameters do not record how they are split, and a stage has only its own layers."""
        layout = resolved.run.layout
        if layout.tiers.optimizer == "disk":
            return "layout.offload: verify shrinks the model, and DeepSpeed keeps groups smaller than 1 MiB in memory"
        if layout.tp > 1:
            return "layout.tp: under AutoTP each rank has only its shard of the gradients"
        if layout.pp > 1:
            return "layout.pp: each rank has only its stage's gradients"
        return ""

    def remedy(self, error: ProgramError) -> str:
        """Operators compile on first use: a killed build leaves a lock, and the one for state on disk needs libaio."""
        if not isinstance(error, NoStepError):
            return "this operator needs libaio: apt install libaio-dev" if "async_io" in str(error) else ""
        locks = sorted((Path.home() / ".cache" / "torch_extensions").rglob("lock"))
        left = f"; if no build is running, remove {locks[0]}, left by a build that was killed" if locks else ""
        return f"DeepSpeed compiles operators on first use; raise --patience{left}"

    def needs_gpu(self, resolved: ResolvedRun) -> str:
        """ZeRO++'s kernels."""
        return NEEDS_GPU if _zero_plus_plus(resolved.run.layout) else ""

    def cannot_offload(self, layout: LayoutSpec) -> str:
        """DeepSpeed offloads parameters, and state to disk, only under ZeRO-3, and nothing without ZeRO."""
        tiers, stage = layout.tiers, stage_of(layout)
        if tiers.activations != "device":
            return "this program does not support offloading activations"
        if tiers.optimizer == "disk" and stage < 3:
            return f"DeepSpeed offloads to disk only with layout.zero=3, not {stage}"
        if tiers.parameters == "disk":
            return "on a CPU, DeepSpeed 0.19.8 rounds parameters on disk to bf16, even fp32 ones; use parameters: host"
        if tiers.checksums:
            return "DeepSpeed does not verify checksums of state on disk; leave checksums out"
        if tiers.optimizer_share < 1:
            return "DeepSpeed offloads part of the optimizer state only with its own CPU Adam; set optimizer_share: 1"
        if not stage:
            return "DeepSpeed offloads only under ZeRO; set layout.zero"
        if tiers.parameters == "host" and stage < 3:
            return (
                f"DeepSpeed offloads parameters only with layout.zero=3, not {stage}; use offload={{optimizer: host}}"
            )
        return ""

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Another exchange of context parallelism."""
        layout = resolved.run.layout
        if layout.cp > 1 and layout.cp_method not in ("auto", "ulysses"):
            return {"layout.cp_method": "DeepSpeed supports only Ulysses: the same losses"}
        return {}

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """DeepSpeed's configuration."""
        return {"ds_config.json": json.dumps(ds_config(resolved), indent=2) + "\n"}

    def words(self, resolved: ResolvedRun, program: str) -> dict[str, Any]:
        """Also the stage of ZeRO."""
        return super().words(resolved, program) | {"stage": stage_of(resolved.run.layout)}


NEEDS_GPU = "ZeRO++'s quantization kernels need a GPU"


def _zero_plus_plus(layout: LayoutSpec) -> dict[str, bool]:
    """DeepSpeed's keys for quantized communication."""
    kinds = {"zero_quantized_weights": layout.quantized_weights, "zero_quantized_gradients": layout.quantized_gradients}
    return {key: True for key, kind in kinds.items() if kind != "none"}


def stage_of(layout: LayoutSpec) -> int:
    """The ZeRO stage. AutoTP, Ulysses and pipelines have at least stage 1, on any number of ranks: without ZeRO they
    report no norm. One process with its state on disk has stage 3, which alone swaps."""
    if layout.cp > 1:
        return max(1, layout.zero_stage)
    alone = strategy_of(layout) == "single" and layout.tiers.optimizer == "disk"
    return 3 if alone else max(STAGES[strategy_of(layout)], int(layout.tp * layout.pp > 1))


def ds_config(resolved: ResolvedRun) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    training, layout = resolved.run.training, resolved.run.layout
    mixed = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": training.reduce_dtype},
        "communication_data_type": training.reduce_dtype,
    }
    zero: dict[str, Any] = {"stage": stage_of(layout), **_offload(layout.tiers), **_zero_plus_plus(layout)}
    if strategy_of(layout) == "hybrid":
        zero["zero_hpz_partition_size"] = layout.dp_shard
        zero["stage3_param_persistence_threshold"] = 0  # else small parameters stay whole, and have no second share
    if layout.cp > 1:
        zero["reduce_scatter"] = True  # without it ZeRO-3 sums gradients of a sample's ranks, with it it averages them
    if layout.tiers.optimizer == "disk":
        zero["sub_group_size"] = SWAPPED
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
        **({"aio": AIO} if layout.tiers.optimizer == "disk" else {}),
        "steps_per_print": 1_000_000,
    }


def _offload(tiers: OffloadSpec) -> dict[str, Any]:
    """The state that ZeRO keeps in host memory or on disk."""
    folder = tiers.directory or "offload"
    kept = {"offload_optimizer": _kept(tiers.optimizer, folder), "offload_param": _kept(tiers.parameters, folder)}
    return {key: where for key, where in kept.items() if where}


def _kept(where: Literal["device", "host", "disk"], folder: str) -> dict[str, Any]:
    match where:
        case "device":
            return {}
        case "host":
            return {"device": "cpu"}
        case "disk":
            overlapped = {"buffer_count": BUFFERS, "fast_init": True, "pipeline_read": True, "pipeline_write": True}
            return {"device": "nvme", "nvme_path": folder, **overlapped}
        case other:
            assert_never(other)


def _cannot_split_samples(resolved: ResolvedRun) -> dict[str, str]:
    """Settings that the program cannot express under Ulysses."""
    refusals, layout, model = dict[str, str](), resolved.run.layout, resolved.model
    if model.family not in ULYSSES:
        refusals["layout.cp"] = (
            f"the program for deepspeed supports Ulysses for {', '.join(ULYSSES)}, not {model.family}"
        )
    elif model.sliding_window is not None:
        refusals["layout.cp"] = "DeepSpeed's Ulysses drops attention masks, so the model's sliding window would be lost"
    elif model.num_heads % layout.cp or (model.num_kv_heads % layout.cp and layout.cp % model.num_kv_heads):
        heads = f"{model.num_heads} heads and {model.num_kv_heads} key/value heads"
        refusals["layout.cp"] = (
            f"Ulysses gives each rank whole heads, but layout.cp={layout.cp} does not divide {heads}"
        )
    elif resolved.run.data.sequence_length % layout.cp:
        refusals["layout.cp"] = (
            f"Ulysses splits samples evenly, but layout.cp={layout.cp} does not divide "
            f"{resolved.run.data.sequence_length} tokens"
        )
    if layout.tp > 1:
        refusals["layout.tp"] = "the program for deepspeed does not combine AutoTP with Ulysses; set layout.tp=1"
    if layout.dp_replicate > 1 and layout.zero_stage:
        refusals["layout.zero"] = (
            "the program for deepspeed does not combine hybrid sharding with Ulysses; set layout.dp_replicate=1"
        )
    if layout.tiers != NOTHING:
        refusals["layout.offload"] = "the program for deepspeed does not combine offloading with Ulysses"
    return refusals


def _cannot_pipeline(resolved: ResolvedRun) -> dict[str, str]:
    """Settings that the program of a pipeline cannot express."""
    refusals, layout, model = dict[str, str](), resolved.run.layout, resolved.model
    if model.family != "llama":
        refusals["model.family"] = "the program for deepspeed's pipeline supports only llama"
    if model.tied_embeddings:
        refusals["model.tied_embeddings"] = "the program does not tie embeddings across pipeline stages"
    if layout.schedule != "1f1b":
        refusals["layout.schedule"] = "DeepSpeed's pipeline supports only 1f1b"
    if layout.virtual_stages > 1:
        refusals["layout.stages_per_rank"] = "DeepSpeed's pipeline supports only one stage per rank"
    refusals |= refused_axes(layout, "tp", reason="DeepSpeed's pipeline does not split matrices")
    refusals |= refused_axes(layout, "cp", reason="DeepSpeed's pipeline does not split samples")
    refusals |= refused_data(layout, reason="the program for deepspeed's pipeline does not support data parallelism")
    if layout.tiers != NOTHING:
        refusals["layout.offload"] = "the program for deepspeed's pipeline does not support offloading"
    if resolved.run.training.precision != FP32.name:
        refusals["training.precision"] = "the program for deepspeed's pipeline supports only fp32"
    if resolved.run.training.compile:
        refusals["training.compile"] = "the program for deepspeed's pipeline does not support torch.compile"
    return refusals
