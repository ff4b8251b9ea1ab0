"""What an asynchronous pipeline excludes (PipeDream-2BW; Narayanan et al., 2021): it keeps two whole versions of the
weights and applies each gradient one step late, so that training differs from one process. Sentences, each with what
works instead."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.spec.errors import NEAREST
from meshwright.spec.low_precision import DELAYED
from meshwright.spec.offload import NOTHING
from meshwright.spec.precision import BF16

if TYPE_CHECKING:
    from meshwright.spec.layout import LayoutSpec
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.run import Run


def layout_problems(layout: "LayoutSpec") -> Iterator[str]:
    """Problems within a layout that names an asynchronous schedule."""
    instead = f"{NEAREST} schedule=1f1b, or"
    if layout.pp == 1:
        yield f"schedule={layout.schedule} with pp=1: there is no pipeline; set pp, or leave schedule out"
    if layout.zero_stage > 0:
        replicas = layout.dp_replicate * layout.dp_shard
        yield (
            f"schedule={layout.schedule} with zero={layout.zero_stage}: each rank keeps two whole versions of its "
            f"weights, which ZeRO would shard; {instead} dp_replicate={replicas}, dp_shard=1, zero=0"
        )
    for axis, degree in (("tp", layout.tp), ("ep", layout.ep)):
        if degree > 1:
            yield (
                f"schedule={layout.schedule} with {axis}={degree}: two versions are kept only of whole weights, "
                f"but {axis} splits weights over ranks; {instead} {axis}=1"
            )
    if layout.tiers != NOTHING:
        yield (
            f"schedule={layout.schedule} with offload={layout.offload_word}: its old weights stay on the device "
            f"until their backward pass; {instead} offload=none"
        )


def model_misfits(layout: "LayoutSpec", model: "ModelSpec") -> Iterator[str]:
    """Reasons why a model cannot be trained so; none if the layout is synchronous."""
    if layout.asynchronous and model.router_bias:
        yield (
            f"layout.schedule={layout.schedule}: {model.family} balances experts by biases that change at every "
            f"step, also between a forward pass and its backward pass; {NEAREST} schedule=1f1b"
        )


def run_problems(run: "Run") -> Iterator[str]:
    """Settings of other sections that exclude an asynchronous layout; none if the layout is synchronous."""
    training, schedule = run.training, f"layout.schedule={run.layout.schedule}"
    if not run.layout.asynchronous:
        return
    if run.guards.verify_every:
        yield (
            f"guards.verify_every: under {schedule} steps differ from one process by design; set it to 0, or use "
            "layout.schedule=1f1b"
        )
    if run.finetune is not None and run.finetune.method != "full":
        yield (
            f"finetune.method={run.finetune.method} with {schedule}: keeps two versions of all weights, which defeats "
            "the memory savings of adapters; use layout.schedule=1f1b"
        )
    if training.master_dtype == BF16.name:
        yield (
            f"training.master_dtype=bf16 with {schedule}: keeps two versions of the weights besides the master "
            "weights; use layout.schedule=1f1b"
        )
    if training.dtypes.scales_loss:
        yield (
            f"training.precision={training.precision} with {schedule}: the loss scale may change between a forward "
            "pass and its backward pass in the next step; use bf16, or layout.schedule=1f1b"
        )
    if training.product_recipe == DELAYED:
        yield (
            f"training.low_precision.recipe={DELAYED} with {schedule}: scales would change between a forward pass and "
            "its backward pass; use recipe=tensorwise, or schedule=1f1b"
        )
