"""Low precision on every kind of layout against low precision on one process: loss, every gradient, every weight after
one step, and the state that delayed scales are made of, in float64 beside products in few bits.

A scale that differed anywhere would show: it moves a tenth of a percent of numbers to another code, by percents.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.families import resolve_model
from meshwright.models import draw_rows, named_state
from meshwright.models.low_precision import RECIPES
from meshwright.plan.stages import balanced_stages, layer_costs
from meshwright.prove.reference import alone
from meshwright.spec.data import DataSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, Parameter
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.testing import equivalence
from meshwright.testing.equivalence import Outcome, build_here, loader_for, whole_of_all
from meshwright.testing.ranks import RankPool

LENGTH, BATCH, LR, EPS = 256, 4, 1e-2, 0.1

LAYOUTS = {
    "ddp": LayoutSpec(dp_replicate=2),
    "zero-2": LayoutSpec(dp_shard=2, zero=2),
    "zero-3": LayoutSpec(dp_shard=2, zero=3),
    "tp": LayoutSpec(tp=2),
    "cp-ulysses": LayoutSpec(cp=2, cp_method="ulysses"),
    "pp-zero-bubble": LayoutSpec(pp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}
WIDER = {
    "zero-3-tp": LayoutSpec(dp_shard=2, tp=2),
    "cp-tp": LayoutSpec(cp=2, tp=2, cp_method="ulysses"),
    "pp-zero-bubble-tp": LayoutSpec(pp=2, tp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}


def narrow_run(layout: LayoutSpec, recipe: str, **options: Any) -> ResolvedRun:
    """Two layers whose halves are multiples of every recipe's blocks, on four sequences of 256 tokens a step."""
    precision = recipe if recipe in ("mxfp8", "nvfp4") else "fp8"
    low: dict[str, Any] = {"compute": "fp64"} | ({} if precision != "fp8" else {"recipe": recipe})
    low |= {"amax_history": 3, "margin": 1} if recipe == "delayed" else {}
    low |= options.pop("low_precision", {})
    sizes: dict[str, Any] = {
        "hidden": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn": 256,
    }
    fields = ModelFields(family="llama", vocab=50, max_positions=LENGTH, init_std=0.2, **sizes)
    training = {
        "precision": precision,
        "low_precision": low,
        "optimizer": {"name": "adamw", "lr": LR, "eps": EPS},
        "lr_schedule": {"name": "constant", "warmup": 0},
    }
    training = TrainingSpec.model_validate(training | options)
    run = Run(model=fields, data=DataSpec(sequence_length=LENGTH), training=training, layout=layout, device="cpu")
    model = resolve_model(fields, base_dir=Path())
    accumulation, stages = BATCH // layout.data_parallel // 1, ()
    if layout.pp > 1:
        schedule = layout.pipeline_schedule(microbatches=accumulation, base_dir=Path())
        stages = balanced_stages(layer_costs(model, LENGTH), schedule.num_stages)
    return ResolvedRun(
        run=run,
        model=model,
        global_batch=BATCH,
        micro_batch=1,
        accumulation=accumulation,
        stage_layers=stages,
        reasons={},
    )


def drawn(row: Parameter, start: int, stop: int) -> torch.Tensor:
    """Fresh weights, and histories as steps before would have left them: the largest values of gradients are small."""
    if not row.name.endswith("amax_history"):
        return draw_rows(row, 0, start, stop)
    past = 1 + torch.rand(row.shape, generator=torch.Generator().manual_seed(len(row.name)))
    return (past * torch.tensor([3.0, 0.7, 0.01])[:, None])[start:stop]


def one_step(resolved: ResolvedRun) -> Outcome | None:
    """The run's first step; None on every rank but the first. Collective."""
    trainer = build_here(resolved, weights=drawn)
    step = trainer.train_step
    with loader_for(trainer) as loader:
        loss, _ = step.gradients(loader.microbatches(0))
    gnorm = step.gradient_norm()
    gradients = whole_of_all(trainer, {name: tensor.grad for name, tensor in trainer.parameters.items()})
    step.update(1, gnorm)
    weights = whole_of_all(trainer, trainer.parameters | named_state(trainer.model))
    return Outcome(loss, gnorm, gradients, weights) if trainer.worker.rank == 0 else None


_ALONE: dict[str, Outcome] = {}


def expected(run: ResolvedRun) -> Outcome:
    """The same run on one process, with the same microbatches; computed once."""
    plain = alone(run)
    key = plain.model_dump_json()
    if key not in _ALONE:
        outcome = one_step(plain)
        assert outcome is not None
        _ALONE[key] = outcome
    return _ALONE[key]


def assert_equal(ours: Outcome, other: Outcome) -> None:
    """Up to the order of summation, which moves no number to another code."""
    tolerance = BATCH * LENGTH * torch.finfo(torch.float64).eps
    largest = max(gradient.abs().max().item() for gradient in other.gradients.values())
    assert abs(ours.loss - other.loss) <= tolerance * other.loss
    assert abs(ours.gnorm - other.gnorm) <= tolerance * other.gnorm
    difference, name = equivalence.largest_difference(ours.gradients, other.gradients)
    assert difference <= tolerance * largest, name
    difference, name = equivalence.largest_difference(ours.weights, other.weights)
    assert difference <= tolerance * largest * LR / EPS + 4 * torch.finfo(torch.float64).eps, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_recipe_on_every_kind_of_layout(ranks: RankPool, layout: str) -> None:
    for recipe in RECIPES:
        run = narrow_run(LAYOUTS[layout], recipe)
        assert_equal(ranks.run(2, one_step, run)[0], expected(run))
