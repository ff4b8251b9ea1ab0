"""Asynchronous pipelines compared with their definition: one process whose gradients are a step late."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.data.loader import HostBatch
from meshwright.parallel.pipedream import Pipedream
from meshwright.parallel.pipeline import PipelineRun
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import engine_job
from meshwright.predict.memory import predict_memory
from meshwright.predict.pipeline import schedule_waiting
from meshwright.predict.stages import describe_pipeline
from meshwright.prove.whole import DefinedLate
from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import load_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, largest_difference, loader_for, loss_curve, whole_of_all
from meshwright.testing.ranks import RankPool
from meshwright.trainer.display import Display
from meshwright.trainer.evaluate import evaluate
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.saver import Saver
from meshwright.trainer.session import Outputs, Session
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import restore
from tiny import tiny_run

STEPS = 6
Trajectory = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def layout_of(**degrees: Any) -> LayoutSpec:
    return LayoutSpec.model_validate({"pp": 2, "schedule": "pipedream-2bw"} | degrees)


def late(run: ResolvedRun) -> Trajectory:
    """(loss, gradient norm) of every step and an evaluation after them, and the weights after the last update, for one
    process that makes each step with the previous batch's gradient."""
    trainer = build_here(run)
    step, seen = DefinedLate(trainer, LayoutSpec()), []
    with loader_for(trainer) as loader:
        for number in range(1, STEPS + 1):
            figures = step(number, loader.microbatches(number - 1))
            seen.append((figures["loss"], figures["norm"]))
        seen.append(evaluated(trainer, loader.microbatches(0)))
    step.finish(STEPS)
    return seen, whole_of_all(trainer, trainer.parameters)


def trained(run: ResolvedRun) -> Trajectory:
    """The same for an asynchronous pipeline, emptied at the end. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        results = [trainer.train_step(step, loader.microbatches(step - 1)) for step in range(1, STEPS + 1)]
        between = evaluated(trainer, loader.microbatches(0))
    trainer.train_step.finish(STEPS)
    seen = [*((result.loss, result.gnorm or 0.0) for result in results), between]
    return seen, whole_of_all(trainer, trainer.parameters)


def evaluated(trainer: Trainer, microbatches: Sequence[HostBatch]) -> tuple[float, float]:
    """An evaluation while a batch is in flight: it must use the optimizer's weights and leave the batch unchanged."""
    step = trainer.train_step
    loss = evaluate(step.passes, microbatches, trainer.device, repeats_loss=step.repeats_loss).loss
    return loss, 0.0


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({}, {"tied": True, "clip": 0.05}),
        ({"dp_replicate": 2}, {"recompute": "full", "optimizer": {"name": "muon", "muon_lr": 0.02, "eps": 0.1}}),
        ({"pp": 4}, {"recompute": "selective", "family": "gpt2"}),
        ({"cp": 2}, {"family": "mixtral", "num_layers": 3}),
    ],
)
def test_gradients_are_a_step_late_and_nothing_else(ranks: RankPool, degrees: Any, options: Any) -> None:
    """On all stages: if a backward pass used other weights than its forward pass, or a stage's update came earlier or
    later, losses would differ."""
    layout = layout_of(**degrees)
    options = {"num_layers": 5, "lr_schedule": {"name": "cosine", "warmup": 2}, "steps": STEPS} | options
    run = tiny_run(layout, accumulation=6, **options)
    losses, weights = ranks.run(layout.world_size, trained, run)[0]
    expected, expected_weights = late(tiny_run(LayoutSpec(), **options))
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    assert largest_difference(weights, expected_weights)[0] < 1e-10


@pytest.mark.slow
def test_low_precision(ranks: RankPool) -> None:
    """Gradients are summed in fp32: with one sequence per microbatch, one process sums the same numbers."""
    options: dict[str, Any] = {"accumulation": 12, "precision": "bf16", "steps": STEPS}
    losses, weights = ranks.run(2, trained, tiny_run(layout_of(), **options))[0]
    expected, expected_weights = late(tiny_run(LayoutSpec(), **options))
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert largest_difference(weights, expected_weights)[0] < 1e-5


def weights_of_passes(run: ResolvedRun) -> tuple[list[float], list[float], list[int], int, int]:
    """On this rank: a figure that identifies the weights of each forward pass, in order; the same for the backward
    passes; the number of backward passes that did not use the newest weights; and bytes of the weights for computation,
    and of one version of them. Collective."""
    seen: dict[str, list[float]] = {"F": [], "B": []}
    stale = [0]

    def watched(kind: str, method: Any) -> Any:
        def act(self: Any, action: Any) -> None:
            weight = next(iter(self.pipeline.model.layers.values())).attention.wq.weight
            seen[kind].append(weight.detach().sum().item())
            stale[-1] += kind == "B" and seen["B"][-1] != seen["F"][-1]
            method(self, action)

        return act

    trainer = build_here(run)
    with (
        mock.patch.object(PipelineRun, "forward", watched("F", PipelineRun.forward)),
        mock.patch.object(PipelineRun, "backward", watched("B", PipelineRun.backward)),
        loader_for(trainer) as loader,
    ):
        for step in (1, 2, 3):
            trainer.train_step(step, loader.microbatches(step - 1))
            stale.append(0)
        trainer.train_step.finish(3)
    passes = trainer.train_step.passes
    assert isinstance(passes, Pipedream)
    held = sum(weight.nbytes for version in passes.versions for weight in version.weights)
    return seen["F"], seen["B"], stale, held, sum(parameter.nbytes for parameter in trainer.parameters.values())


def test_every_backward_pass_has_the_weights_of_its_forward_pass(ranks: RankPool) -> None:
    """Microbatches return in the order in which they were sent. Rank r makes 3 - r backward passes per step with
    weights that are not the newest; it holds only two versions."""
    answers = ranks.run(4, weights_of_passes, tiny_run(layout_of(pp=4), accumulation=6, num_layers=4, steps=3))
    for rank, (forward, backward, stale, held, one) in enumerate(answers):
        assert forward == backward
        assert len(forward) == 18
        assert [len(set(forward[start : start + 6])) for start in (0, 6, 12)] == [1, 1, 1]
        assert len(set(forward)) == 2  # the first two batches use the same weights, because the first gradient is late
        assert stale == [0, 0, 3 - rank, 0]
        assert held == 2 * one


@pytest.mark.exhaustive
def test_it_trains_to_the_same_region(ranks: RankPool) -> None:
    """A step late, and no worse."""
    options: dict[str, Any] = {"precision": "fp32", "optimizer": {"lr": 1e-2, "eps": 1e-2}, "steps": 60}

    def curve(layout: LayoutSpec) -> list[float]:
        run = tiny_run(layout, accumulation=2, **options)
        run = run.model_copy(update={"model": run.model.model_copy(update={"vocab": 256})})
        return ranks.run(layout.world_size, loss_curve, run, 60)[0]

    alone, ours = curve(LayoutSpec()), curve(layout_of())
    assert ours != alone
    assert ours[:1] == pytest.approx(alone[:1])
    first, last = (sum(part) / 10 for part in (alone[:10], alone[-10:]))
    assert last < first - 1
    assert abs(sum(ours[-10:]) / 10 - last) < 0.1 * (first - last)


def saver_of(trainer: Trainer, run_dir: Path) -> Saver:
    """The `Saver` of a run that displays and records nothing."""
    display = Display(steps=STEPS, memory_bytes=1, device="cpu", enabled=False)
    return Saver(Session(trainer, mock.MagicMock(), Outputs(run_dir, display, None), mock.MagicMock()))


def saved(run: ResolvedRun, root: Path, *, resume: bool = False) -> Trajectory:
    """`trained`, for a run that saves its third step, or continues from there. Collective."""
    trainer, results = build_here(run), []
    if resume:
        restore(trainer, root / "checkpoints" / checkpoint_name(3))
    with loader_for(trainer) as loader:
        while trainer.step < STEPS:
            trainer.step += 1
            results.append(trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1)))
            if trainer.step == 3:
                saver = saver_of(trainer, root)
                saver.save()
                saver.wait()
    trainer.train_step.finish(STEPS)
    return [(result.loss, result.gnorm or 0.0) for result in results], whole_of_all(trainer, trainer.parameters)


def continued(run: ResolvedRun, root: Path) -> Trajectory:
    return saved(run, root, resume=True)


@pytest.mark.slow
def test_checkpoints_are_plain_and_continue_anywhere(ranks: RankPool, tmp_path: Path) -> None:
    """The pipeline is emptied before each save, so a resumed run equals the continued one."""
    options: dict[str, Any] = {"tied": True, "steps": STEPS}
    run = tiny_run(layout_of(dp_replicate=2), accumulation=6, **options)
    losses, weights = ranks.run(4, saved, run, tmp_path)[0]
    again, weights_again = ranks.run(4, continued, run, tmp_path)[0]
    assert again == losses[3:]
    assert largest_difference(weights_again, weights)[0] == 0
    alone, _ = continued(tiny_run(LayoutSpec(), **options), tmp_path)
    assert alone[0][0] == pytest.approx(losses[3][0], rel=1e-10)


def is_emptied(run: ResolvedRun, root: Path) -> bool:
    """Whether nothing is in flight after a run has saved its step. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.step = 1
        trainer.train_step(1, loader.microbatches(0))
    passes = trainer.train_step.passes
    assert isinstance(passes, Pipedream)
    assert passes.under_way is not None
    saver_of(trainer, root).save()
    return passes.under_way is None and all(parameter.grad is None for parameter in trainer.parameters.values())


def test_a_checkpoint_empties_the_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, is_emptied, tiny_run(layout_of(), accumulation=2), tmp_path) == [True, True]


def test_what_check_says() -> None:
    said = describe_pipeline(tiny_run(layout_of(), accumulation=6))
    assert "no bubble, 9% of the time waiting" in said
    assert said.endswith("gradients are one step late, so results differ from one process")


def test_the_planner_counts_two_versions_and_no_bubble() -> None:
    run = tiny_run(layout_of(), accumulation=6)
    late, synchronous = (
        predict_memory(engine_job(run.run, blueprint(run.model), global_batch=12, micro_batch=2, layout=layout))
        for layout in (layout_of(), layout_of(schedule="1f1b"))
    )
    assert (late.weights, late.gradients) == (2 * synchronous.weights, 2 * synchronous.gradients)
    assert late.optimizer == synchronous.optimizer > 0
    bubbles = [schedule_waiting(schedule, 2, 6, 1).share for schedule in ("pipedream-2bw", "1f1b")]
    assert bubbles == [0, 1]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"pp": 1}, "pp=1: there is no pipeline"),
        ({"dp_shard": 2}, "zero=3: .* two whole versions .* schedule=1f1b, or dp_replicate=2, dp_shard=1, zero=0"),
        ({"tp": 2}, "tp=2: two versions are kept only of whole weights"),
        ({"tp": 2, "ep": 2}, "ep=2: two versions"),
        ({"offload": "cpu"}, "offload=cpu: its old weights stay on the device"),
        ({"stages_per_rank": 2}, "has exactly 1"),
    ],
)
def test_layouts_that_it_cannot_work_with(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(**degrees)


def test_models_and_precisions_that_it_cannot_work_with(tmp_path: Path) -> None:
    model = tiny_run(LayoutSpec(), family="deepseek_v3").model
    assert "biases that change at every step" in find_misfits(layout_of(), model, 16)[0]
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: llama-3-8b\nlayout: {pp: 4, schedule: pipedream-2bw}\ntraining: {precision: fp16}\n")
    with pytest.raises(ValueError, match="the loss scale may change between"):
        resolve_run(load_spec(recipe, Run), base_dir=tmp_path)
    with pytest.raises(ValueError, match="defeats the memory savings of adapters"):
        resolve_run(load_spec(recipe, Run, ["finetune={method: lora}"]), base_dir=tmp_path)
