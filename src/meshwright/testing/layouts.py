"""The one place that lists the layouts which tests hold to one process, and those that must be refused.

`docs/equivalence.md` is made from it. To prove another mix, add a line.
"""

from typing import Any

from pydantic import ValidationError

from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec

LAYOUTS = {
    "single": LayoutSpec(),
    "ddp": LayoutSpec(dp_replicate=4),
    "zero-1": LayoutSpec(dp_shard=4, zero=1),
    "zero-2": LayoutSpec(dp_shard=4, zero=2),
    "zero-3": LayoutSpec(dp_shard=4, zero=3),
    "zero-3-uneven": LayoutSpec(dp_shard=3, zero=3),
    "hybrid-1": LayoutSpec(dp_replicate=2, dp_shard=2, zero=1),
    "hybrid-2": LayoutSpec(dp_replicate=2, dp_shard=2, zero=2),
    "hybrid-3": LayoutSpec(dp_replicate=2, dp_shard=2, zero=3),
    "offload": LayoutSpec(dp_shard=2, zero=3, offload="cpu"),
    "tp": LayoutSpec(tp=2),
    "tp-wide": LayoutSpec(tp=4),
    "ddp-tp": LayoutSpec(dp_replicate=2, tp=2),
    "zero-1-tp": LayoutSpec(dp_shard=2, tp=2, zero=1),
    "zero-2-tp": LayoutSpec(dp_shard=2, tp=2, zero=2),
    "zero-3-tp": LayoutSpec(dp_shard=2, tp=2),
    "zero-3-tp-uneven": LayoutSpec(dp_shard=4, tp=2),
    "zero-3-tp-wide": LayoutSpec(dp_shard=2, tp=4),
    "hybrid-3-tp": LayoutSpec(dp_replicate=2, dp_shard=2, tp=2),
    "offload-tp": LayoutSpec(dp_shard=2, tp=2, offload="cpu"),
    "cp": LayoutSpec(cp=4),
    "zero-3-cp": LayoutSpec(dp_shard=2, cp=2),
    "cp-ring-tp": LayoutSpec(cp=2, tp=2, cp_method="ring"),
    "cp-all-gather-tp": LayoutSpec(cp=2, tp=2, zero=3, cp_method="all_gather"),
    "cp-ulysses-tp": LayoutSpec(cp=2, tp=2, zero=2, cp_method="ulysses"),
    "hybrid-3-cp-tp": LayoutSpec(dp_replicate=2, cp=2, tp=2, zero=3),
    "pp": LayoutSpec(pp=2),
    "pp-ddp": LayoutSpec(pp=2, dp_replicate=2),
    "pp-zero-3": LayoutSpec(pp=2, dp_shard=2),
    "pp-tp": LayoutSpec(pp=2, tp=2),
    "pp-zero-bubble-tp": LayoutSpec(pp=2, tp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
    "pp-cp": LayoutSpec(pp=2, cp=2),
    "pp-zero-1-tp": LayoutSpec(pp=2, dp_shard=2, tp=2, zero=1),
    "pp-zero-2-tp": LayoutSpec(pp=2, dp_shard=2, tp=2, zero=2),
    "pp-hybrid-3": LayoutSpec(pp=2, dp_replicate=2, dp_shard=2),
    "pp-cp-tp": LayoutSpec(pp=2, cp=2, tp=2),
}
"""By name, for the tests' model: 4 query heads, 2 key and value heads, a vocabulary of 50. `wide`: more ranks than key
and value heads, and than divide the vocabulary. `uneven`: ranks that do not divide the rows of a matrix."""

DATA_PARALLEL = {name: layout for name, layout in LAYOUTS.items() if layout.data_parallel == layout.world_size}
"""Those that leave the model as it is."""

MODEL_PARALLEL = {name: layout for name, layout in LAYOUTS.items() if name not in DATA_PARALLEL}
"""Those that split it."""

CONTEXT_PARALLEL = {
    "cp-every-method": LayoutSpec(cp=4),
    "ddp-cp-every-method": LayoutSpec(dp_replicate=2, cp=2),
    "zero-1-cp-every-method": LayoutSpec(dp_shard=2, cp=2, zero=1),
    "zero-2-cp-every-method": LayoutSpec(cp=4, zero=2),
    "zero-3-cp-every-method": LayoutSpec(dp_shard=2, cp=2, zero=3),
    "hybrid-3-cp-every-method": LayoutSpec(dp_replicate=2, cp=2, zero=3),
}
"""Proven with each way for ranks to attend to one another's tokens: ring, all_gather and ulysses."""

PIPELINE_SHARDED = {
    "pp-ddp-every-schedule": LayoutSpec(pp=2, dp_replicate=2),
    "pp-zero-1-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=1),
    "pp-zero-2-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=2),
    "pp-zero-3-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=3),
}
"""Proven with schedules of every kind: backward passes whole or in two parts, one stage per rank or several."""

EXPERT_PARALLEL = {
    "zero-1-ep": LayoutSpec(dp_shard=4, zero=1, ep=4),
    "zero-2-ep": LayoutSpec(dp_shard=4, zero=2, ep=2),
    "zero-3-ep": LayoutSpec(dp_shard=4, ep=2),
    "zero-3-ep-uneven": LayoutSpec(dp_shard=6, ep=2),
    "hybrid-ep": LayoutSpec(dp_replicate=2, dp_shard=2, ep=2),
    "offload-ep": LayoutSpec(dp_shard=2, ep=2, offload="cpu"),
    "cp-ep": LayoutSpec(cp=2, ep=2),
    "cp-ep-wide": LayoutSpec(cp=4, ep=2, zero=3),
    "ddp-cp-ep": LayoutSpec(dp_replicate=2, cp=2, ep=2),
    "zero-3-cp-ep": LayoutSpec(dp_shard=2, cp=2, ep=4),
    "tp-without-ep": LayoutSpec(dp_shard=2, tp=2),
    "tp-ep": LayoutSpec(tp=2, ep=2),
    "tp-ep-narrow": LayoutSpec(tp=4, ep=2),
    "ddp-tp-ep": LayoutSpec(dp_replicate=2, tp=2, ep=2),
    "zero-3-tp-ep": LayoutSpec(dp_shard=2, tp=2, ep=4),
    "cp-tp-ep": LayoutSpec(cp=2, tp=2, ep=4),
    "zero-3-cp-tp-ep": LayoutSpec(dp_shard=2, cp=2, tp=2, ep=2),
    "pp-zero-3-ep": LayoutSpec(pp=2, dp_shard=4, ep=2),
    "pp-tp-ep": LayoutSpec(pp=2, tp=2, ep=2),
    "pp-zero-bubble-ep": LayoutSpec(pp=2, dp_shard=2, ep=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}
"""For models of experts, of which the tests' have 8. `uneven`: a number of ranks that is no power of two."""

REFUSED: tuple[dict[str, Any], ...] = (
    {"dp_shard": 4, "zero": 0},
    {"dp_replicate": 4, "zero": 2},
    {"tp": 3},
    {"tp": 8},
    {"tp": 4, "dp_shard": 5},
    {"cp": 3, "cp_method": "ring"},
    {"cp": 4, "tp": 4, "cp_method": "ulysses"},
    {"dp_shard": 4, "ep": 3},
)
"""Layouts that cannot train the tests' model on sequences of 16 tokens."""


def refusal(layout: dict[str, Any], model: ModelSpec, sequence_length: int) -> str:
    """Why a layout is refused, in the words that people get; empty where it is not."""
    try:
        return "; ".join(find_misfits(LayoutSpec.model_validate(layout), model, sequence_length))
    except ValidationError as error:
        return "; ".join(str(problem.get("ctx", {}).get("error")) for problem in error.errors())
