"""Engine `megatron`: a loop of Megatron-core's GPT model."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun


class MegatronEngine(TemplateEngine):
    """Megatron-core's `GPTModel` of its local layers, tensor parallel, under PyTorch's DDP: its own DDP, optimizer and
    schedules, and the attention of its local layers, allocate on a GPU whatever the device."""

    name = "megatron"
    about = "a loop of Megatron-core"
    packages: ClassVar = {"transformers": "megatron", "megatron.core": "megatron"}
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}
    axes: ClassVar[Mapping[str, str]] = {"tp": ""}
    precisions = (FP32.name,)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; another model than Llama, and vocabularies, heads or widths that cannot be split."""
        found, model, tp = dict(super().cannot(resolved)), resolved.model, resolved.run.layout.tp
        if resolved.run.layout.pp > 1:
            found["layout.pp"] = "the schedules of Megatron-core count tokens in a tensor on a GPU, whatever the device"
        if model.family != "llama":
            found["model.family"] = "the program for megatron supports llama only"
        if model.rope_scaling is not None:
            found["model.rope_scaling"] = "the program for megatron has plain rope"
        for path, degree in (("model.vocab", model.vocab), ("model.num_kv_heads", model.num_kv_heads)):
            if degree % tp:
                found[path] = f"{degree} cannot be split over layout.tp={tp} by Megatron-core"
        return found

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Recomputation and compilation."""
        found: dict[str, str] = {}
        if set(resolved.recompute) != {"none"}:
            found["training.recompute"] = "nothing is recomputed: the same losses with more memory"
        if resolved.run.training.compile:
            found["training.compile"] = "nothing is compiled: the same losses in more time"
        return found
