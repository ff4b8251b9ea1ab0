"""`verify` covers every objective, all state, data reading, losses by rank, and the norm."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.cli.main import main
from meshwright.families import resolve_model
from meshwright.parallel.data import ShardedGradients
from meshwright.parallel.passes import WholeModel
from meshwright.prove.pairs import pair_layouts
from meshwright.prove.reference import MOST_STEPS, build_alone, samples_for, train_reference
from meshwright.prove.shrink import shrink
from meshwright.prove.verify import Proof, for_proof
from meshwright.spec.layout import AXES, LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.testing.equivalence import build_here
from meshwright.testing.proof import Plant, prove
from meshwright.testing.ranks import RankPool
from meshwright.trainer.step import TrainStep
from tiny import GLOBAL_BATCH, tiny_run

PREFERENCE = {"preference": {"beta": 0.5}}
DROPOUT = {"method": "lora", "rank": 3, "dropout": 0.3}


def patch(target: str, replacement: Any) -> Any:
    return mock.patch(f"meshwright.{target}", replacement)


def margins_of_one_rank_alone() -> Any:
    """An answer's log-probability covers only this rank's tokens, although others have the rest."""
    return patch("models.head.Head.row_sums", lambda self, parts: parts)


def biases_moved_by_own_load() -> Any:
    """Routers' biases follow the loads of one rank's tokens."""
    return patch("optim.balance.collectives", SimpleNamespace(all_reduce_=lambda tensor: tensor))


@contextlib.contextmanager
def wrong_from_the_second_step() -> Iterator[None]:
    """The gradient of the head's input is doubled, but not in the first step."""
    gradients, steps = TrainStep.gradients, 0
    from meshwright.models.head import Head

    loss = Head.loss

    def counted(self: TrainStep, microbatches: Any) -> Any:
        nonlocal steps
        steps += 1
        return gradients(self, microbatches)

    def scaled(self: Head, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(self, 2 * x - x.detach() if steps > 1 else x, labels)

    with patch("trainer.step.TrainStep.gradients", counted), patch("models.head.Head.loss", scaled):
        yield


def wrong_from_step_11() -> Any:
    """The last rank's part of one weight stays unchanged in steps 11 and later."""
    update = TrainStep.update

    def forget(self: TrainStep, step: int, gnorm: float) -> None:
        weight = self.store.parameters["norm.weight"]
        before = weight.detach().clone()
        update(self, step, gnorm)
        if step >= 11 and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                weight.copy_(before)

    return patch("trainer.step.TrainStep.update", forget)


def replicas_not_summed() -> Any:
    """No microbatch is the last one, so replicas never sum their gradients."""
    announce = ShardedGradients.announce
    return patch("parallel.data.ShardedGradients.announce", lambda self, modules, last: announce(self, modules, False))


def everyone_reads_the_first_share() -> Any:
    """The loader treats all data-parallel ranks as the first one."""
    return patch("trainer.setup.Trainer.data_rank", property(lambda self: 0))


@contextlib.contextmanager
def one_rank_trains_other_labels() -> Iterator[None]:
    """Rank 1 omits the first label of each row from its loss, but counts it."""
    from meshwright.models.head import Head

    loss = Head.loss

    def short(self: Head, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(self, x, labels.index_fill(1, torch.tensor([3]), -100) if dist.get_rank() == 1 else labels)

    with patch("models.head.Head.loss", short):
        yield


def norm_of_one_shard() -> Any:
    """The norm covers only this rank's shards, and clipping divides by it."""
    from meshwright.trainer.step import global_gradient_norm

    return patch("trainer.step.global_gradient_norm", lambda *args: global_gradient_norm(*args) / 2**0.5)


def gradients_a_little_large() -> Any:
    """All gradients are 2 % too large, less than bf16's rounding of single numbers."""
    train = WholeModel.train
    return patch("parallel.passes.WholeModel.train", lambda self, batches, scale: train(self, batches, 1.02 * scale))


def moment_lost() -> Any:
    """Rank 1 drops the head's first moment after the step."""
    update = TrainStep.update

    def forget(self: TrainStep, step: int, gnorm: float) -> None:
        update(self, step, gnorm)
        if dist.get_rank() == 1:
            state = self.store.tensors()["optimizer.output.weight.exp_avg"]
            state.to_local().zero_()  # type: ignore[attr-defined]

    return patch("trainer.step.TrainStep.update", forget)


def start_of_other_rows() -> Any:
    """Rank 1 starts with its norms reversed."""
    from meshwright.parallel.materialize import _fill

    def reversed_(local: torch.Tensor, row: Any, *rest: Any) -> None:
        _fill(local, row, *rest)
        if dist.get_rank() == 1 and row.name == "norm.weight":
            local.copy_(local.flip(0))

    return patch("parallel.materialize._fill", reversed_)


DP, MOE = LayoutSpec(dp_shard=2), {"family": "deepseek_v3"}


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (LayoutSpec(cp=2, tp=2), PREFERENCE),
        (LayoutSpec(dp_shard=2, pp=2), PREFERENCE),
        (LayoutSpec(dp_shard=2, ep=2), MOE),
        (LayoutSpec(dp_shard=2), {"optimizer": {"name": "adamw_8bit"}, "width": 64, "clip": None}),
        (LayoutSpec(dp_replicate=2), {"precision": "fp16"}),
        (LayoutSpec(tp=2), {"precision": "bf16"}),
        (LayoutSpec(dp_shard=2, tp=2), {"finetune": DROPOUT, "recompute": "full", "accumulation": 3}),
        (
            LayoutSpec(pp=2, dp_replicate=2, cp=2, schedule="interleaved-zero-bubble", zero=2),
            {"finetune": {"method": "ia3"}, "accumulation": 2, "num_layers": 4},
        ),
    ],
)
def test_right_layouts_are_proved_equal(ranks: RankPool, tmp_path: Path, layout: LayoutSpec, options: Any) -> None:
    proof = prove(ranks, tmp_path, tiny_run(layout, **options))
    assert proof.equal, proof.location
    assert all(comparison.state for comparison in proof.comparisons)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "layout", "options", "phase", "name", "wrong_ranks"),
    [
        (margins_of_one_rank_alone, LayoutSpec(cp=2), PREFERENCE, "loss", "loss", (0, 1)),
        (biases_moved_by_own_load, DP, MOE, "state", "load of experts", None),
        (wrong_from_the_second_step, DP, MOE, "backward", "norm", (0, 1)),
        (replicas_not_summed, LayoutSpec(dp_replicate=2), {}, "reduction", "output.weight", None),
        (replicas_not_summed, LayoutSpec(dp_replicate=2, dp_shard=2), {}, "reduction", "output.weight", None),
        (one_rank_trains_other_labels, DP, {}, "loss", "loss", (1,)),
        (norm_of_one_shard, DP, {}, "norm", "gradient norm", None),
        (moment_lost, DP, {}, "state", "output.weight.exp_avg", (1,)),
        (gradients_a_little_large, DP, {"precision": "bf16"}, "backward", "norm", None),
        (start_of_other_rows, LayoutSpec(tp=2), {}, "start", "norm.weight", (1,)),
    ],
)
def test_faults_are_named(
    ranks: RankPool,
    tmp_path: Path,
    plant: Plant,
    layout: LayoutSpec,
    options: Any,
    phase: str,
    name: str,
    wrong_ranks: tuple[int, ...] | None,
) -> None:
    location = prove(ranks, tmp_path, tiny_run(layout, accumulation=2, **options), plant).location
    assert location is not None
    assert (location.phase, location.name) == (phase, name)
    if wrong_ranks is not None:
        assert location.ranks == wrong_ranks


@pytest.mark.exhaustive
def test_a_fault_that_begins_at_step_11_is_found(ranks: RankPool, tmp_path: Path) -> None:
    run = tiny_run(LayoutSpec(dp_replicate=2), num_layers=1, steps=16)
    proof = prove(ranks, tmp_path, run, wrong_from_step_11, steps=16)
    assert proof.comparisons[-1].step == 11
    assert proof.location is not None
    assert (proof.location.phase, proof.location.name, proof.location.ranks) == ("update", "norm.weight", (1,))


def test_a_proof_has_samples_for_as_many_steps_as_it_may_take() -> None:
    trainer = build_here(for_proof(tiny_run(LayoutSpec())))
    assert len(samples_for(trainer)) == MOST_STEPS * GLOBAL_BATCH


def test_who_read_what_is_said(ranks: RankPool, tmp_path: Path) -> None:
    location = prove(ranks, tmp_path, tiny_run(DP, accumulation=2), everyone_reads_the_first_share).location
    assert location is not None
    assert location.phase == "data"
    assert location.name == "sample 0 of the step was read by ranks 0, 1, but 1 should have read it"


def test_a_proof_trains_the_recipes_objective(tmp_path: Path) -> None:
    run = for_proof(tiny_run(LayoutSpec(), preference={"beta": 1e-6}))
    assert train_reference(build_alone(run), LayoutSpec(), tmp_path, 1).facts(1)["loss"] == pytest.approx(
        0.693147, abs=1e-4
    )  # log 2


def test_every_step_of_a_proof_is_clipped(tmp_path: Path) -> None:
    run = for_proof(tiny_run(LayoutSpec()))
    facts = train_reference(build_alone(run), LayoutSpec(), tmp_path, 1).facts(1)
    assert 0 < facts["factor"] == pytest.approx(0.01 / facts["gnorm"])
    assert for_proof(tiny_run(LayoutSpec(), clip=None)).run.training.clip is None


def test_what_is_shrunk_has_what_needs_size() -> None:
    """Three microbatches, positions past 256, blocks of eight bits, experts without tokens."""
    run = tiny_run(DP, optimizer={"name": "adamw_8bit"}, accumulation=2)
    data = run.run.data.model_copy(update={"sequence_length": 4096})
    large = run.model_copy(
        update={
            "run": run.run.model_copy(update={"data": data}),
            "model": resolve_model(ModelFields(name="mixtral-8x7b"), base_dir=Path()),
        }
    )
    small = shrink(large)
    assert small.accumulation == 3
    assert small.run.data.sequence_length > 256
    assert small.model.hidden * small.model.ffn >= 4096
    assert small.model.hidden % 16 == 0
    assert small.model.num_experts >= 2 * small.model.experts_per_token + 2


def test_routers_of_a_proof_are_uneven(tmp_path: Path) -> None:
    trainer = build_alone(for_proof(tiny_run(LayoutSpec(), family="mixtral")))
    load = train_reference(trainer, LayoutSpec(), tmp_path, 1).facts(1)["expert_load"]
    assert load is not None
    assert load > 1.6


def test_a_large_layout_is_proved_by_pairs_of_axes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LayoutSpec(pp=4, dp_shard=8, cp=2, tp=2, ep=4, schedule="interleaved-1f1b", zero=2)
    pairs = pair_layouts(layout)
    assert len(pairs) == 6
    assert max(pair.world_size for pair in pairs) <= 16
    assert {tuple(axis for axis in AXES if getattr(pair, axis) > 1) for pair in pairs} == set(
        itertools.combinations(("pp", "dp_shard", "cp", "tp"), 2)
    )
    assert all(pair.zero == (2 if pair.dp_shard * pair.cp > 1 else "auto") for pair in pairs)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "model: llama-3-8b\ntraining: {steps: 9, global_batch: 64}\nlayout: {dp_shard: 8, cp: 2, tp: 2}\n"
    )
    monkeypatch.setattr("meshwright.prove.verify.verify", lambda resolved, **_: Proof([], 1e-13))
    assert main(["verify", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "proof 3 of 3: tensor parallel x 2 + context parallel x 2; about" in said
    assert main(["verify", str(recipe), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pairs"]) == 3
    assert main(["verify", str(recipe), "--full"]) == 0
    assert "proof 1" not in capsys.readouterr().out
