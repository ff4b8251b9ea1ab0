"""The layouts that tests compare with one process, and those that must be refused.

`docs/equivalence.md` is generated from this file. To prove another layout, add a line.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import ResolvedRun

LAYOUTS = {
    "single": LayoutSpec(),
    "ddp": LayoutSpec(dp_replicate=2),
    "zero-1": LayoutSpec(dp_shard=2, zero=1),
    "zero-2": LayoutSpec(dp_shard=3, zero=2),
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
    "zero-3-tp-uneven": LayoutSpec(dp_shard=3, tp=2),
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
    "pp-zero-2-tp": LayoutSpec(pp=2, dp_shard=2, tp=2, zero=2),
    "pp-hybrid-3": LayoutSpec(pp=2, dp_replicate=2, dp_shard=2),
    "pp-cp-tp": LayoutSpec(pp=2, cp=2, tp=2),
}
"""By name, for the tests' model: 4 query heads, 2 key and value heads, a vocabulary of 50. `wide`: more ranks than key
and value heads, and not a divisor of the vocabulary. `uneven`: ranks that do not divide the rows of a matrix."""

DATA_PARALLEL = {name: layout for name, layout in LAYOUTS.items() if layout.data_parallel == layout.world_size}
"""Layouts that do not split the model."""

MODEL_PARALLEL = {name: layout for name, layout in LAYOUTS.items() if name not in DATA_PARALLEL}
"""Layouts that split the model."""

CONTEXT_PARALLEL = {
    "cp-every-method": LayoutSpec(cp=4),
    "zero-1-cp-every-method": LayoutSpec(dp_shard=2, cp=2, zero=1),
    "zero-2-cp-every-method": LayoutSpec(cp=4, zero=2),
    "zero-3-cp-every-method": LayoutSpec(dp_shard=2, cp=2, zero=3),
    "hybrid-3-cp-every-method": LayoutSpec(dp_replicate=2, cp=2, zero=3),
}
"""Proven with each context-parallel method: ring, all_gather and ulysses."""

PIPELINE_SHARDED = {
    "pp-ddp-every-schedule": LayoutSpec(pp=2, dp_replicate=2),
    "pp-zero-1-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=1),
    "pp-zero-2-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=2),
    "pp-zero-3-every-schedule": LayoutSpec(pp=2, dp_shard=2, zero=3),
}
"""Proven with every kind of schedule: with whole or split backward passes, one stage per rank or several."""

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
    "pp-zero-3-ep": LayoutSpec(pp=2, dp_shard=4, ep=2),
    "pp-tp-ep": LayoutSpec(pp=2, tp=2, ep=2),
    "pp-zero-bubble-ep": LayoutSpec(pp=2, dp_shard=2, ep=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}
"""For MoE models; the tests' models have 8 experts. `uneven`: a number of ranks that is not a power of two."""

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
    """Why a layout is refused, in the user's error message; empty if it is not."""
    try:
        return "; ".join(find_misfits(LayoutSpec.model_validate(layout), model, sequence_length))
    except ValidationError as error:
        return "; ".join(str(problem.get("ctx", {}).get("error")) for problem in error.errors())


class Drawn(NamedTuple):
    """A random run whose layout is legal."""

    seed: int
    """The seed of this run only."""
    run: ResolvedRun
    beside: str
    """The option drawn besides the layout."""


FAMILIES = ("llama", "gpt2", "mistral", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")

BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"optimizer": {"name": "muon", "eps": 0.1}},
    {"clip": None},
    {"tied": True},
    {"preference": {"beta": 0.5}},
    {"finetune": {"method": "lora", "rank": 3}},
    {"finetune": {"method": "lora", "rank": 3, "dora": True}},
    {"finetune": {"method": "ia3"}},
    {"finetune": {"method": "qlora", "rank": 4}},
)
"""Options for `tiny_run` besides a layout."""


def random_layouts(
    *, seed: int, count: int, build: Callable[[dict[str, Any]], ResolvedRun | None], most_ranks: int = 8
) -> Iterator[Drawn]:
    """Random legal layouts of 2 to `most_ranks` ranks, each with a family and one further option. The i-th depends only
    on `seed + i`. `build` makes a run from the options of the tests' `tiny_run`, or None if it cannot."""
    for number in range(seed, seed + count):
        generator = random.Random(number)
        while True:
            options = _draw(generator, most_ranks)
            run = None if options is None else build(options)
            if run is not None and not find_misfits(run.run.layout, run.model, run.run.data.sequence_length):
                beside = {key: value for key, value in options.items() if key != "layout"} if options else {}
                yield Drawn(number, run, ", ".join(f"{key}={value}" for key, value in beside.items()))
                break


def _draw(generator: random.Random, most_ranks: int) -> dict[str, Any] | None:
    """Options of a run; None if the degrees are not a legal layout."""
    degrees = {axis: generator.choice((1, 1, 1, 2, 2, 3, 4)) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    family, beside = generator.choice(FAMILIES), generator.choice(BESIDE)
    choices: dict[str, Any] = {"zero": generator.choice(("auto", 1, 2, 3)), "ep": generator.choice((1, 2, 4))}
    choices["cp_method"] = generator.choice(("auto", "ring", "all_gather", "ulysses"))
    if degrees["pp"] > 1:
        choices["schedule"] = generator.choice(
            ("1f1b", "afab", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
        )
    elif degrees["tp"] == 1 and generator.random() < 0.2:
        choices["offload"] = "cpu"
    try:
        layout = LayoutSpec.model_validate({**degrees, **choices})
    except ValueError:
        return None
    if not 1 < layout.world_size <= most_ranks or (beside.get("tied") and family == "deepseek_v3"):
        return None
    layers = {"num_layers": 2 * layout.pp} if layout.pp > 1 and family != "deepseek_v3" else {}
    return {"layout": layout, "family": family, "accumulation": generator.choice((1, 2, 3)), **layers, **beside}
