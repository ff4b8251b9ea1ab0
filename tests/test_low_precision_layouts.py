"""Low precision on every kind of layout, compared with low precision on one process: loss, every gradient, every weight
after one step, and the state of delayed scales, in float64 apart from the low-precision products.

A wrong scale anywhere would be detected: it moves a tenth of a percent of numbers to another code, by percents.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.families import resolve_model
from meshwright.models import draw_rows, named_state
from meshwright.models.low_precision import RECIPES
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.prove.reference import alone
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.data import DataSpec
from meshwright.spec.fit import fp8_gather_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, Parameter
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.testing import equivalence
from meshwright.testing.equivalence import Outcome, build_here, loader_for, whole_of_all
from meshwright.testing.ranks import RankPool
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import describe_restored, restore, state_tensors, state_values
from test_traffic import counted_and_predicted

LENGTH, MOST, LR, EPS = 256, 4, 1e-2, 0.1

LAYOUTS = {
    "ddp": LayoutSpec(dp_replicate=2),
    "zero-2": LayoutSpec(dp_shard=2, zero=2),
    "zero-3": LayoutSpec(dp_shard=2, zero=3),
    "tp": LayoutSpec(tp=2),
    "cp-ulysses": LayoutSpec(cp=2, cp_method="ulysses"),
    "pp-zero-bubble": LayoutSpec(pp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}
SOME = {
    "zero-1": (LayoutSpec(dp_shard=2, zero=1), ("rowwise", "delayed", "nvfp4")),
    "cp-ring": (LayoutSpec(cp=2), ("tensorwise", "mxfp8", "nvfp4")),
    "cp-all-gather": (LayoutSpec(cp=2, cp_method="all_gather"), ("rowwise", "delayed", "mxfp8")),
}
"""Layouts whose products see what those of another kind see (ZeRO-2, Ulysses): a few recipes each."""
WIDER = {
    "zero-3-tp": LayoutSpec(dp_shard=2, tp=2),
    "cp-tp": LayoutSpec(cp=2, tp=2, cp_method="ulysses"),
    "pp-zero-bubble-tp": LayoutSpec(pp=2, tp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
}


EXPERTS = {
    "ddp": (LayoutSpec(dp_replicate=2), ("tensorwise", "delayed", "mxfp8", "nvfp4")),
    "zero-1": (LayoutSpec(dp_shard=2, zero=1), ("tensorwise", "mxfp8", "nvfp4")),
    "zero-2": (LayoutSpec(dp_shard=2, zero=2), ("mxfp8",)),
    "zero-3-ep": (LayoutSpec(dp_shard=2, ep=2), ("blockwise", "nvfp4")),
    "tp": (LayoutSpec(tp=2), ("tensorwise", "rowwise")),
    "cp-ep": (LayoutSpec(cp=2, ep=2, cp_method="ulysses"), ("tensorwise", "delayed")),
    "pp-zero-bubble": (LayoutSpec(pp=2, schedule="interleaved-zero-bubble", stages_per_rank=1), ("nvfp4",)),
    "ddp-ep-tp": (LayoutSpec(dp_replicate=2, tp=2, ep=2), ("rowwise",)),
    "cp-tp-ep": (LayoutSpec(cp=2, tp=2, ep=2, cp_method="ulysses"), ("tensorwise", "rowwise_with_gw_hp")),
    "zero-3-tp-ep": (LayoutSpec(dp_shard=2, tp=2, ep=4), ("tensorwise", "rowwise", "delayed")),
}
"""Layouts of a model of experts: ranks have separate rows of an expert, or share those of one microbatch."""


def run_of_experts(layout: LayoutSpec, recipe: str, **options: Any) -> ResolvedRun:
    """Four experts; each token uses two."""
    model = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2}
    return narrow_run(layout, recipe, model=model, **options)


def narrow_run(layout: LayoutSpec, recipe: str, *, batch: int = 0, **options: Any) -> ResolvedRun:
    """Two layers whose halves are multiples of every recipe's blocks, on sequences of 256 tokens, each a microbatch.

    `batch`: sequences a step. By default four with delayed scales, whose histories collect every microbatch of every
    rank, and else one for each rank, at least two.
    """
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
    sizes |= {"family": "llama"} | options.pop("model", {})
    fields = ModelFields(vocab=50, max_positions=LENGTH, init_std=0.2, **sizes)
    finetune = options.pop("finetune", None)
    training = {
        "precision": precision,
        "low_precision": low,
        "optimizer": {"name": "adamw", "lr": LR, "eps": EPS},
        "lr_schedule": {"name": "constant", "warmup": 0},
    }
    training = TrainingSpec.model_validate(training | options)
    run = Run(
        model=fields,
        data=DataSpec(sequence_length=LENGTH),
        training=training,
        finetune=finetune,  # pyright: ignore[reportArgumentType]
        layout=layout,
        device="cpu",
    )
    model = resolve_model(fields, base_dir=Path())
    batch = batch or (MOST if recipe == "delayed" else max(2, layout.data_parallel))
    accumulation, stages = batch // layout.data_parallel, ()
    if layout.pp > 1:
        schedule = layout.pipeline_schedule(microbatches=accumulation, base_dir=Path())
        stages = balanced_stages(layer_costs(model, LENGTH), schedule.num_stages)
    return ResolvedRun(
        run=run,
        model=model,
        global_batch=batch,
        micro_batch=1,
        accumulation=accumulation,
        stage_layers=stages,
        reasons={},
    )


def drawn(row: Parameter, start: int, stop: int) -> torch.Tensor:
    """Fresh weights, and histories as after earlier steps: the largest values of gradients are small."""
    if row.adapter:  # as if it had been trained
        row = dataclasses.replace(row, init="normal", init_std=0.2)
    if not row.name.endswith("amax_history"):
        return draw_rows(row, 0, start, stop)
    past = 1 + torch.rand(row.shape, generator=torch.Generator().manual_seed(len(row.name)))
    sizes = torch.tensor([3.0, 0.7, 0.01]).repeat(row.shape[0] // 3)[:, None]
    return (past * sizes)[start:stop]


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
    """Up to the order of summation, which moves no number to another code: a gradient has passed one sum over tokens
    and, in each of two layers, one over the width."""
    tolerance = 3 * MOST * LENGTH * torch.finfo(torch.float64).eps
    largest = max(gradient.abs().max().item() for gradient in other.gradients.values())
    assert abs(ours.loss - other.loss) <= tolerance * other.loss
    assert abs(ours.gnorm - other.gnorm) <= tolerance * other.gnorm
    difference, name = equivalence.largest_difference(ours.gradients, other.gradients)
    assert difference <= tolerance * largest, name
    difference, name = equivalence.largest_difference(ours.weights, other.weights)
    assert difference <= tolerance * largest * LR / EPS + 4 * torch.finfo(torch.float64).eps, name


@pytest.mark.every(8)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recipe"), [(layout, recipe) for layout in LAYOUTS for recipe in RECIPES])
def test_every_recipe_on_every_kind_of_layout(ranks: RankPool, layout: str, recipe: str) -> None:
    run = narrow_run(LAYOUTS[layout], recipe, batch=MOST if layout == "zero-2" else 0)
    assert_equal(ranks.run(2, one_step, run)[0], expected(run))


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", SOME)
def test_some_recipes_on_layouts_like_those(ranks: RankPool, layout: str) -> None:
    for recipe in SOME[layout][1]:
        run = narrow_run(SOME[layout][0], recipe)
        assert_equal(ranks.run(2, one_step, run)[0], expected(run))


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_few_bits(ranks: RankPool, name: str) -> None:
    """Every expert has its own scales, over its rows of a microbatch, on any rank."""
    layout, recipes = EXPERTS[name]
    for recipe in recipes:
        run = run_of_experts(layout, recipe, recompute="full" if name == "cp-tp-ep" else "none")
        assert_equal(ranks.run(layout.world_size, one_step, run)[0], expected(run))


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", WIDER)
def test_ranks_that_share_layers_in_two_ways(ranks: RankPool, layout: str) -> None:
    for recipe in ("rowwise", "delayed", "nvfp4"):
        run = narrow_run(WIDER[layout], recipe, recompute="full" if layout == "cp-tp" else "none")
        assert_equal(ranks.run(4, one_step, run)[0], expected(run))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero-3", "tp"])
def test_adapters_beside_frozen_matrices_in_few_bits(ranks: RankPool, layout: str) -> None:
    for recipe in ("tensorwise", "nvfp4"):
        run = narrow_run(LAYOUTS[layout], recipe, finetune={"method": "lora", "rank": 2})
        assert_equal(ranks.run(2, one_step, run)[0], expected(run))


def continued(run: ResolvedRun, root: Path) -> list[float]:
    """Losses of the steps after the checkpoint below `root`. Collective."""
    trainer = build_here(run)
    restore(trainer, root / checkpoint_name(2))
    return train(trainer, 4)


def train(trainer: Trainer, last: int) -> list[float]:
    losses = []
    with loader_for(trainer) as loader:
        while trainer.step < last:
            trainer.step += 1
            losses.append(trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1)).loss)
    return losses


def saved_at(trainer: Trainer, root: Path, step: int = 2) -> list[float]:
    """Losses of the steps up to `step`, and a checkpoint after them."""
    losses, writer = train(trainer, step), CheckpointWriter(root, CheckpointSpec())
    writer.begin(step, state_tensors(trainer), state_values(trainer))
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.problem is None, outcome.problem
    return losses


@pytest.mark.slow
def test_delayed_scales_continue_from_a_checkpoint_on_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    run = narrow_run(LayoutSpec(dp_shard=2, tp=1), "delayed", low_precision={"amax_history": 2})
    trainer = build_here(alone(run))
    saved_at(trainer, tmp_path)
    histories = [buffer.clone() for buffer in named_state(trainer.model).values()]
    expected = train(trainer, 4)
    assert len(histories) == 14
    assert all(history.shape == (3, 2) and history.all() for history in histories)
    for ours in ranks.run(2, continued, run, tmp_path):
        assert ours == pytest.approx(expected, rel=1e-12)
    forgetful = build_here(alone(run))
    restore(forgetful, tmp_path / checkpoint_name(2))
    for buffer in named_state(forgetful.model).values():
        buffer.zero_()
    assert train(forgetful, 4)[0] != pytest.approx(expected[0], rel=1e-7)


def handed_on(run: ResolvedRun, root: Path, begin: int, end: int) -> list[float]:
    """Losses of the steps from checkpoint `begin`, or from the start, to `end`, after which another is saved.
    Collective."""
    trainer = build_here(run)
    if begin:
        restore(trainer, root / checkpoint_name(begin))
    return saved_at(trainer, root, end)


@pytest.mark.exhaustive
def test_experts_histories_go_from_layout_to_layout(ranks: RankPool, tmp_path: Path) -> None:
    """Expert parallelism, one process, tensor parallelism: as if one process had trained the whole run."""
    short: dict[str, Any] = {"low_precision": {"amax_history": 2}}
    plain, shared, split = (
        run_of_experts(layout, "delayed", **short)
        for layout in (LayoutSpec(), LayoutSpec(dp_shard=2, ep=2), LayoutSpec(tp=2))
    )
    trainer = build_here(alone(shared))
    expected = train(trainer, 6)
    histories = [buffer for name, buffer in named_state(trainer.model).items() if "experts" in name]
    assert len(histories) == 6
    assert all(history.shape == (3 * 4, 2) and history.all() for history in histories)
    (first, _), second = ranks.run(2, handed_on, shared, tmp_path, 0, 2), handed_on(alone(plain), tmp_path, 2, 4)
    third, _ = ranks.run(2, handed_on, split, tmp_path, 4, 6)
    assert [*first, *second, *third] == pytest.approx(expected, rel=1e-12)


def test_delayed_scales_begin_anew_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    saved_at(build_here(narrow_run(LayoutSpec(), "tensorwise", batch=MOST)), tmp_path)
    trainer = build_here(narrow_run(LayoutSpec(), "delayed"), weights=drawn)
    saved = restore(trainer, tmp_path / checkpoint_name(2))
    assert not any(buffer.any() for buffer in named_state(trainer.model).values())
    assert "delayed scales of 14 layers start empty" in describe_restored(trainer, saved)


GATHERED: list[tuple[dict[str, Any], bool]] = [
    ({"dp_shard": 2}, False),
    ({"dp_shard": 2, "zero": 1}, True),
    ({"dp_replicate": 2, "dp_shard": 2}, False),
    ({"dp_shard": 2, "tp": 2}, False),
    ({"dp_shard": 4, "ep": 2}, True),
]
"""Layouts, and whether the model has experts."""


def gathered_in_fp8(run: ResolvedRun) -> tuple[Outcome | None, Any]:
    """The first step, and the counted and predicted traffic. Collective."""
    return one_step(run), counted_and_predicted(run)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GATHERED)))
def test_weights_gathered_in_fp8_are_the_codes_that_products_multiply(ranks: RankPool, number: int) -> None:
    """Only the bytes change, and they equal the prediction."""
    layout, experts = GATHERED[number]
    fields = LayoutSpec.model_validate(layout | {"quantized_weights": "fp8"})
    make = run_of_experts if experts else narrow_run
    again = {"recompute": "full", "batch": MOST} if number == 0 else {}  # gathers before every pass of two microbatches
    run = make(fields, "tensorwise", **again)
    found = ranks.run(fields.world_size, gathered_in_fp8, run)
    assert_equal(found[0][0], expected(run))
    usual_run = make(LayoutSpec.model_validate(layout), "tensorwise", **again)
    plain = ranks.run(fields.world_size, counted_and_predicted, usual_run)
    gathers = ("all-gather", "shard")
    for (_, (counted, predicted)), (usual, _) in zip(found, plain, strict=True):
        assert counted[gathers] == predicted[gathers]
        assert counted[gathers] < 0.4 * usual[gathers]
        if fields.tp == 1:  # else maxima of activations are reduced too, which plans omit
            assert counted["all-reduce", "shard"] == predicted["all-reduce", "shard"] > 0


@pytest.mark.slow
def test_beside_bf16_weights_gathered_in_fp8_change_no_bit(ranks: RankPool) -> None:
    plain, coded = (
        ranks.run(2, one_step, narrow_run(layout, "tensorwise", low_precision={"compute": "bf16"}))[0]
        for layout in (LayoutSpec(dp_shard=2), LayoutSpec(dp_shard=2, quantized_weights="fp8"))
    )
    assert plain.loss == coded.loss
    assert all(torch.equal(plain.gradients[name], coded.gradients[name]) for name in plain.gradients)
    assert all(torch.equal(plain.weights[name], coded.weights[name]) for name in plain.weights)


def test_weights_have_one_scale_or_are_not_gathered_in_fp8() -> None:
    layout = LayoutSpec(dp_shard=2, quantized_weights="fp8")
    (why,) = fp8_gather_misfits(layout, narrow_run(layout, "rowwise").run.training, None)
    assert "products in rowwise have no single scale per weight" in why
    assert "products in bf16" in fp8_gather_misfits(layout, TrainingSpec(), None)[0]
    assert not fp8_gather_misfits(layout, narrow_run(layout, "tensorwise").run.training, None)
