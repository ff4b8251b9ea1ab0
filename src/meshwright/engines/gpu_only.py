"""Variants of engines that run on GPUs only: exported as programs, which refuse to start on a CPU."""

import json
from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.deepspeed import STAGES, ds_config
from meshwright.engines.engine import TemplateEngine, strategy_of
from meshwright.engines.loops import AccelerateEngine, HfTrainer
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun


class GpuOnly(TemplateEngine):
    """An engine that would silently train differently on a CPU."""

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As the engine; also device=cpu, and a single rank, which shards nothing."""
        refusals = dict(super().cannot(resolved))
        if resolved.run.device == "cpu":
            refusals["device"] = f"{self.gpu_only}; use device=auto"
        if strategy_of(resolved.run.layout) == "single":
            refusals["layout"] = f"{self.name} needs at least two ranks; set layout.dp_shard"
        return refusals


class AccelerateFsdp(GpuOnly, AccelerateEngine):
    """Accelerate's plug-in for FSDP2."""

    name = "accelerate_fsdp"
    about = "a loop of Hugging Face Accelerate with its FSDP2 plug-in"
    gpu_only = "on a CPU Accelerate ignores its FSDP plug-in and trains with DDP"
    strategies = ("zero2", "zero3", "hybrid")


class DeepSpeedPlugIn(GpuOnly):
    """A package's plug-in for DeepSpeed, with a ds_config.json."""

    strategies = ("zero1", "zero2", "zero3")
    counts: ClassVar[bool] = False
    """Whether the package itself passes DeepSpeed the number of microbatches of a step."""

    def cannot_offload(self, layout: LayoutSpec) -> str:
        """As DeepSpeed: the optimizer's state and parameters to host memory."""
        tiers = layout.tiers
        if tiers.activations != "device" or tiers.optimizer not in ("device", "host") or tiers.optimizer_share < 1:
            return "this export offloads only parameters and the whole optimizer state, to host memory"
        if tiers.parameters == "host" and layout.zero_stage < 3:
            return "DeepSpeed offloads parameters only with layout.zero=3; use offload={optimizer: host}"
        return ""

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """DeepSpeed's configuration."""
        assert resolved.run.layout.zero_stage == STAGES[strategy_of(resolved.run.layout)]
        config = ds_config(resolved)
        if self.counts:
            del config["gradient_accumulation_steps"]
        return {"ds_config.json": json.dumps(config, indent=2) + "\n"}


class AccelerateDeepSpeed(DeepSpeedPlugIn, AccelerateEngine):
    """Accelerate's plug-in for DeepSpeed."""

    name = "accelerate_deepspeed"
    about = "a loop of Hugging Face Accelerate with its DeepSpeed plug-in"
    gpu_only = "on a CPU Accelerate ignores its DeepSpeed plug-in and trains with DDP"
    packages: ClassVar = {"transformers": "deepspeed", "accelerate": "deepspeed", "deepspeed": "deepspeed"}


class FabricDeepSpeed(DeepSpeedPlugIn):
    """Fabric's `DeepSpeedStrategy`."""

    name = "fabric_deepspeed"
    about = "a loop of Lightning Fabric with its DeepSpeedStrategy"
    gpu_only = "on a CPU Fabric refuses its DeepSpeedStrategy"
    packages: ClassVar = {"transformers": "deepspeed", "lightning_fabric": "compare", "deepspeed": "deepspeed"}


class LightningDeepSpeed(DeepSpeedPlugIn):
    """The Trainer's `DeepSpeedStrategy`."""

    name = "lightning_deepspeed"
    about = "the Trainer of PyTorch Lightning with its DeepSpeedStrategy"
    gpu_only = "on a CPU Lightning refuses its DeepSpeedStrategy"
    packages: ClassVar = {"transformers": "deepspeed", "pytorch_lightning": "lightning", "deepspeed": "deepspeed"}
    counts = True


class FsdpStrategy(GpuOnly):
    """Lightning's `FSDPStrategy`, which is FSDP1."""

    strategies = ("zero2", "zero3", "hybrid")


class FabricFsdp(FsdpStrategy):
    """Fabric's `FSDPStrategy`."""

    name = "fabric_fsdp"
    about = "a loop of Lightning Fabric with its FSDPStrategy"
    gpu_only = "on a CPU Fabric refuses its FSDPStrategy"
    packages: ClassVar = {"transformers": "compare", "lightning_fabric": "compare"}


class LightningFsdp(FsdpStrategy):
    """The Trainer's `FSDPStrategy`."""

    name = "lightning_fsdp"
    about = "the Trainer of PyTorch Lightning with its FSDPStrategy"
    gpu_only = "on a CPU Lightning refuses its FSDPStrategy"
    packages: ClassVar = {"transformers": "lightning", "pytorch_lightning": "lightning"}


class HfTrainerFsdp(GpuOnly, HfTrainer):
    """The Trainer's own `fsdp` and `fsdp_config`."""

    name = "hf_trainer_fsdp"
    about = "the Trainer of Hugging Face transformers with fsdp_config"
    gpu_only = "on a CPU the Trainer ignores fsdp and trains with DDP"
    resumes = True
    strategies = ("zero2", "zero3")

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `GpuOnly`; its FSDP reduces gradients in the dtype in which it computes."""
        refusals, training = dict(super().cannot(resolved)), resolved.run.training
        if training.precision == BF16.name and training.reduce_dtype == FP32.name:
            refusals["training.reduce_dtype"] = (
                "the Trainer's FSDP reduces gradients in bf16; set training.reduce_dtype=bf16"
            )
        return refusals
