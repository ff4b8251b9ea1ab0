"""Engine `transformers`: a plain loop over a model that Hugging Face transformers splits."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun


class TransformersEngine(TemplateEngine):
    """transformers' `DistributedConfig`: FSDP2, hybrid sharding, tensor and expert parallelism by the model's own
    plans."""

    name = "transformers"
    about = "a plain loop over a model sharded by transformers"
    packages: ClassVar = {"transformers": "compare"}
    oldest: ClassVar = {"transformers": "5.23"}  # before July 2026 DistributedConfig had no sizes of axes
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("zero3", "hybrid"), "")
    axes: ClassVar[Mapping[str, str]] = {"tp": "", "ep": ""}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; a model that transformers has no plan for, and data parallelism without sharding."""
        found, run = dict(super().cannot(resolved)), resolved.run
        if run.layout.tp > 1 and resolved.model.family == "gpt2":
            found["layout.tp"] = "transformers has no tensor-parallel plan for gpt2"
        split = run.layout.tp * run.layout.ep * run.layout.data_parallel > 1
        if split and run.training.precision == BF16.name and run.training.reduce_dtype != FP32.name:
            found["training.reduce_dtype"] = "transformers reduces gradients in fp32"
        return found
