"""Engine `megatron`: a loop of Megatron-core's GPT model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import TemplateEngine, refused_data
from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun

SCHEDULES = ("1f1b", "interleaved-1f1b")
"""Its pipeline schedules."""


class MegatronEngine(TemplateEngine):
    """Megatron-core's `GPTModel` of its local layers: tensor parallel, under PyTorch's DDP; and in its own pipeline
    schedules. Its own DDP and optimizer, and the attention of its local layers, allocate on a GPU whatever the device.
    """

    name = "megatron"
    about = "a loop of Megatron-core"
    packages: ClassVar = {"transformers": "megatron", "megatron.core": "megatron"}
    strategies = ("ddp",)
    axes = ("tp", "pp")
    precisions = (FP32.name,)
    recomputes = False

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; another model than Llama, and vocabularies, heads or widths that cannot be split."""
        refusals, model, tp = dict(super().cannot(resolved)), resolved.model, resolved.run.layout.tp
        if resolved.run.layout.pp > 1:
            refusals |= _cannot_pipeline(resolved)
        if model.family != "llama":
            refusals["model.family"] = "the program for megatron supports only llama"
        if model.rope_scaling is not None:
            refusals["model.rope_scaling"] = "the program for megatron does not support scaled rope"
        for path, degree in (("model.vocab", model.vocab), ("model.num_kv_heads", model.num_kv_heads)):
            if degree % tp:
                refusals[path] = f"Megatron-core cannot split {degree} over layout.tp={tp}"
        return refusals

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Also compilation and stages of unequal length."""
        left_out = dict(super().leaves_out(resolved))
        if resolved.run.training.compile:
            left_out["training.compile"] = "no compilation: the same losses, slower steps"
        layers = resolved.run.layout.stage_layers
        if layers != "auto" and len(set(layers)) > 1:
            left_out["layout.stage_layers"] = (
                "all stages get the same number of layers: the same losses, other step times"
            )
        return left_out

    def words(self, resolved: ResolvedRun, program: str) -> dict[str, Any]:
        """Also the microbatches that pass one stage of a rank before the next, as in our schedule."""
        microbatches = resolved.accumulation
        group = microbatches // max(1, microbatches // resolved.run.layout.pp)
        return super().words(resolved, program) | {"group": group}


def _cannot_pipeline(resolved: ResolvedRun) -> dict[str, str]:
    """Settings that the program of a pipeline cannot express."""
    refusals, layout, model = dict[str, str](), resolved.run.layout, resolved.model
    stages = layout.pp * layout.virtual_stages
    if layout.schedule not in SCHEDULES:
        refusals["layout.schedule"] = f"Megatron-core supports {' and '.join(SCHEDULES)}"
    elif layout.virtual_stages > 1 and resolved.accumulation < layout.pp:
        refusals["layout.schedule"] = (
            f"Megatron-core's interleaved schedule needs at least layout.pp={layout.pp} microbatches, not "
            f"{resolved.accumulation}"
        )
    if model.num_layers % stages:
        refusals["model.num_layers"] = f"{model.num_layers} layers cannot be split into {stages} equal stages"
    return refusals | refused_data(
        layout, reason="the program for megatron's pipeline does not support data parallelism"
    )
