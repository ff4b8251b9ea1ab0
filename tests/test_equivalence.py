"""Every data-parallel strategy against one process: loss, every gradient, every weight after one step, in float64."""

from typing import Any

import pytest
import torch

from meshwright.families import resolve_model
from meshwright.spec.data import DataSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import OptimizerSpec, TrainingSpec
from meshwright.testing.equivalence import Outcome, largest_difference, one_step
from meshwright.testing.ranks import RankPool

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

STRATEGIES = {
    "ddp": LayoutSpec(dp_replicate=4),
    "zero-1": LayoutSpec(dp_shard=4, zero=1),
    "zero-2": LayoutSpec(dp_shard=4, zero=2),
    "zero-3": LayoutSpec(dp_shard=4, zero=3),
    "zero-3-uneven": LayoutSpec(dp_shard=3, zero=3),
    "hybrid-1": LayoutSpec(dp_replicate=2, dp_shard=2, zero=1),
    "hybrid-2": LayoutSpec(dp_replicate=2, dp_shard=2, zero=2),
    "hybrid-3": LayoutSpec(dp_replicate=2, dp_shard=2, zero=3),
    "offload": LayoutSpec(dp_shard=2, zero=3, offload="cpu"),
}

GLOBAL_BATCH = 12
UNIT = torch.finfo(torch.float64).eps


def resolved(
    family: str,
    layout: LayoutSpec,
    *,
    tied: bool = False,
    recompute: str = "none",
    accumulation: int = 1,
    optimizer: str = "adamw",
    **training: Any,
) -> ResolvedRun:
    """A tiny run: width 24 and vocabulary 50, which neither 3 nor 4 ranks divide evenly."""
    sizes: dict[str, Any] = {"hidden": 24, "num_layers": 2, "num_heads": 4, "vocab": 50, "max_positions": 16}
    if family != "gpt2":
        sizes |= {"num_kv_heads": 2, "ffn": 40}
    if family == "mistral":
        sizes["sliding_window"] = 8
    fields = ModelFields(family=family, tied_embeddings=tied, init_std=0.2, **sizes)
    run = Run(
        model=fields,
        data=DataSpec(sequence_length=16),
        training=TrainingSpec.model_validate(
            {
                "precision": "fp64",
                "recompute": recompute,
                "optimizer": OptimizerSpec(name=optimizer, lr=1e-2),
                "lr_schedule": {"name": "constant", "warmup": 0},
                **training,
            }
        ),
        layout=layout,
        device="cpu",
    )
    per_rank = GLOBAL_BATCH // layout.data_parallel
    return ResolvedRun(
        run=run,
        model=resolve_model(fields, base_dir=__import__("pathlib").Path()),
        global_batch=GLOBAL_BATCH,
        micro_batch=per_rank // accumulation,
        accumulation=accumulation,
        reasons={},
    )


ALONE: dict[str, Outcome] = {}


def alone(family: str, **options: Any) -> Outcome:
    """The outcome of one process with the whole batch at once, computed once per model."""
    run = resolved(family, LayoutSpec(), **options)
    key = run.model_dump_json()
    if key not in ALONE:
        outcome = one_step(run)
        assert outcome is not None
        ALONE[key] = outcome
    return ALONE[key]


def assert_equal(ours: Outcome, expected: Outcome) -> None:
    """Equal up to the order of summation.

    A sum of n terms in another order differs by at most about n eps times the sum of the terms' sizes; the longest sums
    here run over the batch's 192 tokens, whose terms are of the size of the gradient itself. AdamW divides a gradient
    by its own size, so a step moves by at most lr x (error / |gradient|): weights are compared after scaling by the
    gradient, hence to the gradient's tolerance times lr / eps_adam in the worst case, which no test needs: gradients
    here are far from zero, and 1e-9 is a thousandth of what a single wrong gradient element changes.
    """
    tokens = GLOBAL_BATCH * 16
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    assert abs(ours.loss - expected.loss) <= tokens * UNIT * expected.loss
    difference, name = largest_difference(ours.gradients, expected.gradients)
    assert difference <= tokens * UNIT * max(1.0, largest), name
    assert abs(ours.gnorm - expected.gnorm) <= tokens * UNIT * expected.gnorm
    difference, name = largest_difference(ours.weights, expected.weights)
    assert difference <= 1e-9, name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_strategy_equals_one_process(ranks: RankPool, family: str, strategy: str) -> None:
    layout = STRATEGIES[strategy]
    accumulations = [n for n in (1, 3) if GLOBAL_BATCH // layout.data_parallel % n == 0]
    for tied in (False, True):
        for recompute in ("none", "selective", "full"):
            for accumulation in accumulations:
                run = resolved(family, layout, tied=tied, recompute=recompute, accumulation=accumulation)
                outcome = ranks.run(layout.world_size, one_step, run)[0]
                assert_equal(outcome, alone(family, tied=tied))
