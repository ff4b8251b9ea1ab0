"""Pipelines compared with one process, in float64: every schedule, tied and untied, with every sharding.

`tests/test_equivalence.py` has pipelines combined with the other strategies.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.machine import Machine
from meshwright.models.linear import Linear
from meshwright.parallel.weight_gradients import WeightGradients, add_weight_gradients
from meshwright.predict.stages import describe_pipeline
from meshwright.spec.batch import Batch
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import load_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.schedule import SCHEDULES
from meshwright.testing.equivalence import build_here, largest_difference, loader_for, one_step
from meshwright.testing.layouts import PIPELINE_SHARDED
from meshwright.testing.ranks import RankPool
from meshwright.trainer.evaluate import evaluate
from meshwright.trainer.resolve import resolve_run
from test_equivalence import alone, assert_equal
from test_resume import STEPS, on_ranks, resumed, uninterrupted
from tiny import tiny_run

SYNCHRONOUS = [name for name, kind in SCHEDULES.items() if not kind.asynchronous]
"""`tests/test_pipedream.py` has the other."""


def layers_of(layout: LayoutSpec) -> int:
    """A number for which stages have unequal lengths."""
    return 3 if layout.schedule in ("afab", "1f1b") else 5


def check(
    ranks: RankPool, layout: LayoutSpec, *, microbatches: int = 6, recompute: str = "none", **options: Any
) -> None:
    """A pipeline's outcome, compared with one process that has the whole batch at once."""
    run = tiny_run(layout, accumulation=microbatches, num_layers=layers_of(layout), recompute=recompute, **options)
    outcome = ranks.run(layout.world_size, one_step, run)[0]
    assert_equal(outcome, alone(num_layers=layers_of(layout), **options))


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule(ranks: RankPool, schedule: str, tied: bool) -> None:
    """Numbers of microbatches that the ranks divide, and that they do not; recomputation alternates."""
    for microbatches, recompute in ((4, "full"), (12, "selective")) if tied else ((6, "none"),):
        check(ranks, LayoutSpec(pp=2, schedule=schedule), microbatches=microbatches, recompute=recompute, tied=tied)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PIPELINE_SHARDED)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev"])
def test_every_sharding(ranks: RankPool, schedule: str, name: str) -> None:
    """One stage or several; backward passes whole, split, or mixed: the cases that matter to sharding."""
    layout = PIPELINE_SHARDED[name].model_copy(update={"schedule": schedule})
    check(ranks, layout, tied=layout.zero_stage % 2 == 0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_four_ranks(ranks: RankPool, schedule: str) -> None:
    """Middle ranks have neither embedding nor head; ten layers in stages of one to three; their first layers
    recompute."""
    layout = LayoutSpec(pp=4, schedule=schedule)
    some = {"full": [1, 2, 0, 1], "selective": 0} if schedule == "1f1b" else {"full": 1}
    run = tiny_run(layout, accumulation=4, num_layers=10, tied=True, recompute=some)
    assert len(set(run.stage_layers)) > 1
    assert_equal(ranks.run(4, one_step, run)[0], alone(num_layers=10, tied=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen2"])
def test_families(ranks: RankPool, family: str) -> None:
    """Learned positions enter only the first stage; experts' balance loss joins on every stage; biases are deferred
    too."""
    for schedule in ("1f1b", "zbv"):
        check(ranks, LayoutSpec(pp=2, schedule=schedule), family=family)


def test_stages_cut_by_hand_and_a_schedule_of_ones_own(ranks: RankPool, tmp_path: Path) -> None:
    """Stage 0 and the last one are on rank 1, so rank 0 has neither end; some backward passes are split."""
    path = tmp_path / "mine.csv"
    path.write_text("1F0,1F1,2F0,2F1,2B1,2I0,1B1,1I0,1W0,2W0\n0F0,0F1,3F1,3B1,3F0,3I0,0B1,3W0,0I0,0W0\n")
    layout = LayoutSpec(pp=2, schedule=str(path), stage_layers=(1, 2, 1, 1))
    run = tiny_run(layout, accumulation=2, num_layers=5, tied=True)
    assert_equal(ranks.run(2, one_step, run)[0], alone(num_layers=5, tied=True))


def evaluated(run: ResolvedRun) -> tuple[float, int, float]:
    """(held-out loss, tokens, loss of the training step after it). Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        batches = [*loader.microbatches(1), *loader.microbatches(2), loader.microbatches(3)[0]]
        short = [Batch(batch.tokens[:, :10], batch.labels[:, :10]) for batch in loader.microbatches(1)]
        step = trainer.train_step
        found = [
            evaluate(step.passes, some, trainer.device, repeats_loss=step.repeats_loss) for some in (batches, short)
        ]
        return found[0].loss, found[0].tokens + found[1].tokens, trainer.train_step(2, loader.microbatches(1)).loss


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_evaluation_between_steps(ranks: RankPool, schedule: str) -> None:
    """More microbatches than a step has, and sequences of another length; the next step is unchanged."""
    layout = LayoutSpec.model_validate({"pp": 2, "schedule": schedule, "dp_shard": 1})
    answers = ranks.run(2, evaluated, tiny_run(layout, accumulation=4, num_layers=5))
    expected = evaluated(tiny_run(LayoutSpec(), accumulation=4, num_layers=5))
    for answer in answers:
        assert answer == pytest.approx(expected, rel=1e-12)


RESUMED = {
    "single": LayoutSpec(),
    "zbv": LayoutSpec(pp=2, schedule="zbv"),
    "interleaved x ddp": LayoutSpec(pp=2, dp_replicate=2, schedule="interleaved-1f1b"),
    "zero-3": LayoutSpec(dp_shard=3),
}


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("saver", RESUMED)
def test_stages_in_any_order_continue_what_any_layout_saved(ranks: RankPool, tmp_path: Path, saver: str) -> None:
    """`tests/test_resume.py` has stages in order; both copies of a tied embedding are one tensor in the checkpoint."""

    def run(name: str) -> ResolvedRun:
        return tiny_run(RESUMED[name], num_layers=5, tied=True, steps=STEPS)

    whole = on_ranks(ranks, uninterrupted, run(saver), tmp_path)[0]
    names = list(RESUMED)
    for loader, stop in ((saver, 2), (names[(names.index(saver) + 1) % len(names)], 3)):
        (again,) = on_ranks(ranks, resumed, run(loader), tmp_path, (stop,))[0]
        assert again.losses == [pytest.approx(step, rel=1e-10) for step in whole.losses[stop:]]
        assert largest_difference(again.weights, whole.weights)[0] < 1e-10


def losses_of(run: ResolvedRun) -> list[tuple[float, float, bool]]:
    """(loss, gradient norm, skipped) of two steps. Collective."""
    trainer, results = build_here(run), []
    with loader_for(trainer) as loader:
        for step, scale in ((1, 2.0**40), (2, 2.0**8)):
            if trainer.train_step.scaler is not None:
                trainer.train_step.scaler.scale = scale  # too large for fp16 at first: every rank must skip that step
            results.append(trainer.train_step(step, loader.microbatches(step - 1)))
    return [(result.loss, result.gnorm, result.skipped) for result in results]


@functools.cache
def losses_alone(**options: Any) -> list[tuple[float, float, bool]]:
    """The same of one process."""
    return losses_of(tiny_run(LayoutSpec(), num_layers=5, **options))


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("sharding", [{"dp_replicate": 2}, {"dp_shard": 2}], ids=["ddp", "zero-3"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_low_precision(ranks: RankPool, schedule: str, sharding: dict[str, Any], precision: str) -> None:
    """Stages exchange the residual stream in the compute dtype, in which one process stores it too: so losses are as
    close to one process's as those of other strategies, and both skip the same steps."""
    layout = LayoutSpec.model_validate({"pp": 2, "schedule": schedule, **sharding})
    answers = ranks.run(4, losses_of, tiny_run(layout, accumulation=6, num_layers=5, precision=precision))
    expected = losses_alone(accumulation=12, precision=precision)
    assert [skipped for *_, skipped in expected] == [precision == "fp16", False]
    unit = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    for answer in answers:
        for (loss, gnorm, skipped), (loss_1, gnorm_1, skipped_1) in zip(answer, expected, strict=True):
            assert skipped == skipped_1
            assert loss == pytest.approx(loss_1, rel=4 * unit)
            if not skipped:
                assert gnorm == pytest.approx(gnorm_1, rel=16 * unit)


@pytest.mark.slow
def test_clipping_and_muon(ranks: RankPool) -> None:
    """The norm covers all stages, with a tied embedding counted once, and every rank clips by it."""
    options = {"num_layers": 5, "tied": True, "clip": 0.01, "optimizer": {"name": "muon", "muon_lr": 0.02, "eps": 0.1}}
    expected = losses_of(tiny_run(LayoutSpec(), **options))
    for schedule in ("1f1b", "zbv"):
        run = tiny_run(LayoutSpec(pp=2, dp_shard=2, schedule=schedule), accumulation=6, **options)
        answers = ranks.run(4, losses_of, run)
        assert all(answer == answers[0] for answer in answers)
        for ours, theirs in zip(answers[0], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)


def test_deferred_weight_gradients_are_the_same() -> None:
    """For a layer with a bias, twice; gradients are absent before they are added, and complete afterwards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(5, 7), torch.nn.Tanh(), Linear(7, 3, bias=False)).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum() * 2, [x, *model.parameters()])
    weights, products = WeightGradients(model), []
    for _ in range(2):
        model(x).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        products += weights.take()
    add_weight_gradients(products)
    for tensor, gradient in zip([x, *model.parameters()], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-14, atol=1e-14)


def resolved(recipe: str, tmp_path: Path) -> ResolvedRun:
    (tmp_path / "run.yaml").write_text(
        f"model: {{family: llama, hidden: 32, num_layers: 8, num_heads: 2, vocab: 64}}\n{recipe}"
    )
    machine = Machine(kind="cpu", name="test", memory_bytes=2**34, devices=1)
    return resolve_run(load_spec(tmp_path / "run.yaml", Run), base_dir=tmp_path, machine=machine)


def test_what_is_decided_for_a_pipeline(tmp_path: Path) -> None:
    """Stages by cost, and the largest microbatch that leaves enough microbatches."""
    run = resolved("layout: {pp: 4}\ntraining: {global_batch: 24}\ndata: {sequence_length: 128}", tmp_path)
    assert run.stage_layers == (2, 2, 2, 2)
    assert (run.micro_batch, run.accumulation) == (1, 24)
    assert "4 microbatches per pipeline rank" in run.reasons["training.micro_batch"]
    assert describe_pipeline(run) == (
        "1f1b: stages of 2 + 2 + 2 + 2 layers; with 24 microbatches 13% bubble, at most 4, 3, 2, 1 in flight"
    )
    assert "minimizes" in run.reasons["layout.stage_layers"]
    run = resolved("layout: {pp: 2, schedule: dualpipev, stage_layers: [1, 2, 2, 3]}", tmp_path)
    assert run.stage_layers == (1, 2, 2, 3)
    assert run.accumulation >= 4


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("layout: {pp: 4}\ntraining: {global_batch: 24, micro_batch: 12}", "needs at least 4.*micro_batch=6"),
        ("layout: {pp: 4}\ntraining: {global_batch: 3}", "nearest number that works is 4; set training.global_batch"),
        ("layout: {pp: 16}", "8 layers cannot be split into 16 pipeline stages; use at most 8"),
        (
            "layout: {pp: 8, schedule: zbv}",
            "pp=8 with 2 stages on each rank: 8 layers cannot be split into 16 pipeline stages",
        ),
        ("layout: {pp: 2, stage_layers: [3, 4]}", "has 7 layers, but the model has 8"),
        ("layout: {pp: 2, schedule: zbv}\ntraining: {compile: true}", "zbv.*use interleaved-1f1b, or compile=false"),
        ("layout: {pp: 2, schedule: none.csv}", "none.csv: No such file"),
        ("layout: {pp: 2, schedule: 2f2b}", "schedule=2f2b: known are afab, 1f1b"),
        ("layout: {pp: 2, stage_layers: [3, 4, 1]}", "3 stages, but pp=2 ranks have 1 each"),
        ("layout: {pp: 2, schedule: looped-bfs, stage_layers: [3, 4, 1]}", "ranks have equally many each"),
        ("layout: {pp: 2, stage_layers: [8, 0]}", "every stage has at least one layer"),
        ("layout: {stages_per_rank: 2}", "stages_per_rank=2 with pp=1: there is no pipeline"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(tmp_path: Path, recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(recipe, tmp_path)
