"""Engines of one training loop each: plain PyTorch, Hugging Face's and Lightning's APIs, LitGPT and nanoGPT."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import TemplateEngine, refused_data, strategy_of
from meshwright.engines.settings import Rule, expressed
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun

SPLIT = ("llama", "mistral", "qwen2")
"""Families whose layers the plan of Lightning's programs names, and whose norms see whole hidden states."""
NORM_EPS, EPS = 1e-5, 1e-8
"""Constants that nanoGPT's code has and no argument changes."""


class Bare(TemplateEngine):
    """Plain PyTorch with transformers' model, under DistributedDataParallel, ZeroRedundancyOptimizer or FSDP2."""

    name = "bare"
    about = "a plain PyTorch loop"
    packages: ClassVar = {"transformers": "compare"}
    strategies = ("ddp", "zero1", "zero2", "zero3", "hybrid")


class TransformersEngine(TemplateEngine):
    """transformers' `DistributedConfig`: FSDP2, hybrid sharding, tensor and expert parallelism by the model's own
    plans."""

    name = "transformers"
    about = "a plain loop over a model sharded by transformers"
    packages: ClassVar = {"transformers": "compare"}
    oldest: ClassVar = {"transformers": "5.23"}  # before July 2026 DistributedConfig had no sizes of axes
    strategies = ("zero3", "hybrid")
    axes = ("tp", "ep")

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; a model that transformers has no plan for, and data parallelism without sharding."""
        refusals, run = dict(super().cannot(resolved)), resolved.run
        if run.layout.tp > 1 and resolved.model.family == "gpt2":
            refusals["layout.tp"] = "transformers has no tensor-parallel plan for gpt2"
        split = run.layout.tp * run.layout.ep * run.layout.data_parallel > 1
        if split and run.training.precision == BF16.name and run.training.reduce_dtype != FP32.name:
            refusals["training.reduce_dtype"] = "transformers reduces gradients in fp32"
        return refusals


class HfTrainer(TemplateEngine):
    """transformers' `Trainer`; sharding is transformers' own (`DistributedConfig`), because on a CPU `fsdp=` is
    silently ignored."""

    name = "hf_trainer"
    about = "the Trainer of Hugging Face transformers"
    packages: ClassVar = {"transformers": "compare", "accelerate": "compare"}
    oldest: ClassVar = TransformersEngine.oldest
    strategies = ("ddp", "zero3", "hybrid")
    more_transformers = ", Trainer, TrainerCallback, TrainingArguments"
    rules: ClassVar[Mapping[str, Rule]] = {"data.packing": expressed, "data.separate_documents": expressed}
    resumes: ClassVar[bool] = False
    """Whether the Trainer can resume a sharded model."""

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """The Trainer checkpoints no optimizer of a model that transformers has sharded."""
        if self.resumes or strategy_of(resolved.run.layout) not in ("zero3", "hybrid"):
            return ()
        return ("the Trainer cannot resume a model that transformers has sharded, so the trained model alone is saved",)


class AccelerateEngine(TemplateEngine):
    """Accelerate's `Accelerator`. On a CPU its plug-ins for FSDP and DeepSpeed are silently ignored, so the program has
    only data parallelism."""

    name = "accelerate"
    about = "a loop of Hugging Face Accelerate"
    packages: ClassVar = {"transformers": "compare", "accelerate": "compare"}
    strategies = ("ddp",)


class FabricEngine(TemplateEngine):
    """Lightning's `Fabric`, with `ddp` or `ModelParallelStrategy`: FSDP2, torch's tensor parallelism, or both."""

    name = "fabric"
    about = "a loop of Lightning Fabric"
    packages: ClassVar = {"transformers": "compare", "lightning_fabric": "compare"}
    strategies = ("ddp", "zero2", "zero3")
    axes = ("tp",)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; also families without a tensor-parallel plan, and head counts that cannot be split."""
        refusals, layout, model = dict(super().cannot(resolved)), resolved.run.layout, resolved.model
        if layout.tp == 1:
            return refusals
        if model.family not in SPLIT:
            refusals["layout.tp"] = f"the program for {self.name} has tensor-parallel plans only for {', '.join(SPLIT)}"
        elif model.num_kv_heads % layout.tp:
            refusals["layout.tp"] = (
                f"PyTorch's tensor parallelism gives each rank whole heads, but layout.tp={layout.tp} does not "
                f"divide {model.num_kv_heads} key/value heads"
            )
        if layout.dp_replicate > 1:
            refusals["layout.dp_replicate"] = (
                "ModelParallelStrategy does not combine replicas with tensor parallelism; use dp_shard"
            )
        return refusals


class LightningEngine(FabricEngine):
    """Lightning's `Trainer`, with Fabric's strategies."""

    name = "lightning"
    about = "the Trainer of PyTorch Lightning"
    packages: ClassVar = {"transformers": "lightning", "pytorch_lightning": "lightning"}


class LitGpt(TemplateEngine):
    """LitGPT's `GPT`, trained as its pretrain.py does, on one process: with more, Fabric would take FSDPStrategy, which
    refuses CPUs."""

    name = "litgpt"
    about = "LitGPT"
    packages: ClassVar = {"transformers": "litgpt", "litgpt": "litgpt"}
    strategies = ()
    recomputes = False

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; more than one process, another model than Llama, and scaled rope."""
        refusals, layout = dict(super().cannot(resolved)), resolved.run.layout
        refusals.pop("layout.zero", None)
        refusals |= refused_data(layout, reason="the program for litgpt runs on one process")
        if resolved.model.family != "llama":
            refusals["model.family"] = "the program for litgpt supports only llama"
        if resolved.model.rope_scaling is not None:
            refusals["model.rope_scaling"] = "the program for litgpt does not support scaled rope"
        return refusals


class NanoGpt(TemplateEngine):
    """karpathy's nanoGPT, from a checkout that the user names: its model, optimizer and autocast, on one process or
    under DDP as in its train.py."""

    name = "nanogpt"
    about = "nanoGPT"
    packages: ClassVar = {"transformers": "compare"}
    checkout = "https://github.com/karpathy/nanoGPT"
    strategies = ("ddp",)
    recomputes = False

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; another model than GPT-2, and constants that its code has."""
        refusals, model, run = dict(super().cannot(resolved)), resolved.model, resolved.run
        if model.family != "gpt2":
            refusals["model.family"] = "nanoGPT supports only GPT-2"
        if model.norm_eps != NORM_EPS:
            refusals["model.norm_eps"] = f"nanoGPT's norms use {NORM_EPS:g}"
        if not model.tied_embeddings:
            refusals["model.tied_embeddings"] = "nanoGPT ties the head to the embedding"
        if model.ffn != 4 * model.hidden:
            refusals["model.ffn"] = "nanoGPT uses four times model.hidden"
        if run.training.optimizer.eps != EPS:
            refusals["training.optimizer.eps"] = f"nanoGPT's optimizer uses {EPS:g}"
        return refusals
