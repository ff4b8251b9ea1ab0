"""The one place that says how this repository's engine runs a recipe: which bytes it keeps and what it sends."""

from dataclasses import replace
from typing import Literal

from meshwright.plan.blueprint import Blueprint
from meshwright.plan.job import MESHWRIGHT, Job, Stack
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import Run
from meshwright.spec.training import TrainingSpec

STORED = {"fp64": 8.0}
"""Bytes of a stored weight, gradient or moment; 4 for every other precision."""
CPU_CONTEXT_BYTES = 0.45e9
"""A Python process with torch and gloo."""


def engine_job(
    run: Run,
    model: Blueprint,
    *,
    global_batch: int,
    micro_batch: int,
    device: Literal["cpu", "cuda"] = "cuda",
    layout: LayoutSpec | None = None,
) -> Job:
    """The recipe as a job; `layout` replaces the recipe's."""
    layout = layout or run.layout
    training = run.training
    return Job(
        model=model,
        sequence=run.data.sequence_length,
        global_batch=global_batch,
        micro_batch=micro_batch,
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        zero=layout.zero_stage,
        recompute=training.recompute,
        precision=training.precision,
        offload="cpu" if layout.offload == "cpu" else "none",
        stack=engine_stack(training, alone=layout.world_size == 1 and layout.offload == "none", device=device),
    )


def engine_stack(training: TrainingSpec, *, alone: bool, device: Literal["cpu", "cuda"] = "cuda") -> Stack:
    """What every parameter costs under a recipe's precision and optimizer; `alone` without a mesh."""
    stored = STORED.get(training.precision, 4.0)
    low = training.precision in ("bf16", "fp16")
    return replace(
        MESHWRIGHT,
        fused=training.compile,
        gradient_bytes=stored,
        reduce_bytes=2.0 if low and training.reduce_dtype == "bf16" else stored,
        state_bytes=stored * 3,
        # FSDP2 gathers a copy in the precision of computation; one process alone needs it in low precision only.
        weight_bytes=2.0 if low else 0.0 if alone else stored,
        context_bytes=MESHWRIGHT.context_bytes if device == "cuda" else CPU_CONTEXT_BYTES,
    )
