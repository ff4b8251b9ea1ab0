"""Engine `litgpt`: LitGPT's model, trained as its pretrain.py does."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.spec.run import ResolvedRun


class LitGpt(TemplateEngine):
    """LitGPT's `GPT` under Lightning Fabric, on one process: with more it takes FSDPStrategy, which refuses CPUs."""

    name = "litgpt"
    about = "LitGPT"
    packages: ClassVar = {"transformers": "litgpt", "litgpt": "litgpt"}
    strategies: ClassVar[Mapping[Strategy, str]] = {}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; more than one process, another model than Llama, and scaled rope."""
        found, layout = dict(super().cannot(resolved)), resolved.run.layout
        if layout.data_parallel > 1:
            axis = "dp_shard" if layout.dp_shard > 1 else "dp_replicate"
            found.pop("layout.zero", None)
            found[f"layout.{axis}"] = f"the program for litgpt runs on one process; set layout.{axis}=1"
        if resolved.model.family != "llama":
            found["model.family"] = "the program for litgpt supports only llama"
        if resolved.model.rope_scaling is not None:
            found["model.rope_scaling"] = "the program for litgpt does not support scaled rope"
        return found

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Recomputation."""
        asked = set(resolved.recompute) != {"none"}
        return {"training.recompute": "no recomputation: the same losses, more memory"} if asked else {}
