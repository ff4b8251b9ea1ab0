"""Engine `lightning`: the Trainer of PyTorch Lightning; and what Lightning's ModelParallelStrategy cannot split."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.spec.run import ResolvedRun

SPLIT = ("llama", "mistral", "qwen2")
"""Families whose layers the program's plan names, and whose norms see whole hidden states."""


class ModelParallel(TemplateEngine):
    """Lightning's strategies `ddp` and `ModelParallelStrategy`: FSDP2, torch's tensor parallelism, or both."""

    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero2", "zero3"), "")
    axes: ClassVar[Mapping[str, str]] = {"tp": ""}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; also families without a tensor-parallel plan, and head counts that cannot be split."""
        found, layout, model = dict(super().cannot(resolved)), resolved.run.layout, resolved.model
        if layout.tp == 1:
            return found
        if model.family not in SPLIT:
            found["layout.tp"] = f"the program for {self.name} has tensor-parallel plans only for {', '.join(SPLIT)}"
        elif model.num_kv_heads % layout.tp:
            found["layout.tp"] = (
                f"PyTorch's tensor parallelism gives each rank whole heads, but layout.tp={layout.tp} does not "
                f"divide {model.num_kv_heads} key/value heads"
            )
        if layout.dp_replicate > 1:
            found["layout.dp_replicate"] = (
                "ModelParallelStrategy does not combine replicas with tensor parallelism; use dp_shard"
            )
        return found


class LightningEngine(ModelParallel):
    """Lightning's `Trainer`."""

    name = "lightning"
    about = "the Trainer of PyTorch Lightning"
    packages: ClassVar = {"transformers": "lightning", "pytorch_lightning": "lightning"}
