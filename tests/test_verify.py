"""`verify`: correct layouts are proved equal, and planted faults are caught and located."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.cli import verify as verb
from meshwright.cli.main import main
from meshwright.families import resolve_model
from meshwright.launch.status import STOPPED
from meshwright.machine import Machine
from meshwright.models.norm import RMSNorm
from meshwright.prove import verify as verify_module
from meshwright.prove.rounding import PartSums, judge
from meshwright.prove.shrink import shrink
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import TrainingSpec
from meshwright.testing.proof import Plant, prove
from meshwright.testing.ranks import RankPool
from meshwright.trainer.step import TrainStep
from tiny import NEEDS_SHARDED_INTEGERS, tiny_run


def patch(target: str, replacement: Any) -> Any:
    return mock.patch(f"meshwright.{target}", replacement)


def positions_not_offset() -> Any:
    """Rope counts a rank's tokens from 0."""
    from meshwright.models.decoder import rope_tables

    return patch(
        "models.decoder.rope_tables", lambda rope, width, p: rope_tables(rope, width, torch.arange(p.shape[-1]))
    )


def tokens_counted_on_this_rank_alone() -> Any:
    """The loss is divided by the number of tokens that this rank trains."""
    summed = TrainStep._sum_over_ranks

    def sum_only_losses(self: TrainStep, value: torch.Tensor) -> torch.Tensor:
        return summed(self, value) if value.is_floating_point() else value

    return patch("trainer.step.TrainStep._sum_over_ranks", sum_only_losses)


@contextlib.contextmanager
def accumulation_not_scaled() -> Iterator[None]:
    """Every microbatch's gradient is that of its own mean: too large by the number of microbatches."""
    from meshwright.models import Decoder

    forward = Decoder.forward

    def unscaled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = forward(self, *args, **kwargs)
        return loss + 2 * (loss - loss.detach())  # for three microbatches

    with patch("models.decoder.Decoder.forward", unscaled):
        yield


def received_keys_get_no_gradient() -> Any:
    """A ring's gradients of another rank's keys do not reach that rank."""
    from meshwright.parallel.context import _Backward

    of_keys = _Backward.of_keys

    def only_own(self: _Backward, parts: Any, *keys_values: torch.Tensor) -> torch.Tensor:
        gradient = of_keys(self, parts, *keys_values)
        return gradient if parts[0].mask == "causal" else torch.zeros_like(gradient)

    return patch("parallel.context._Backward.of_keys", only_own)


def gradients_not_summed_over_ranks() -> Any:
    """One rank's share of the norm's gradient is lost before the sum over ranks."""

    class Lossy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * (dist.get_rank() != 1)

    rms_norm = torch.nn.functional.rms_norm

    def lossy(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
        return rms_norm(x, shape, Lossy.apply(weight), eps)  # type: ignore[arg-type]

    return mock.patch.object(RMSNorm, "kernel", staticmethod(lossy))


def one_rank_learns_faster() -> Any:
    """Ranks disagree about the learning rate."""
    lr_factor = TrainStep.lr_factor
    return patch("trainer.step.TrainStep.lr_factor", lambda self, step: lr_factor(self, step) * (1 + dist.get_rank()))


def tied_weights_not_summed() -> Any:
    """The first and the last stage keep their own gradients of the tied embedding."""
    return patch("parallel.pipeline.Pipeline.sum_copies", lambda self: None)


def layer_dropped_at_border() -> Any:
    """The first stage ends a layer early, and the second begins at the right layer."""
    from meshwright.parallel.pipeline import Stages, plan_stages

    def short(resolved: ResolvedRun) -> Stages:
        stages = plan_stages(resolved)
        first, *rest = stages.layers
        return Stages(stages.schedule, (first[:-1], *rest))

    return patch("parallel.apply.plan_stages", short)


class Scaled(torch.autograd.Function):
    """Its gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def experts_gradients_scaled() -> Any:
    """Experts' gradients are counted once for each of the two ranks that share the experts."""
    from meshwright.models.moe import grouped_matmul

    return patch("models.moe.grouped_matmul", lambda x, weight, *n: grouped_matmul(x, Scaled.apply(weight), *n))


@contextlib.contextmanager
def stale_collectives() -> Iterator[None]:
    """Compiled blocks get the sequence that was gathered for the previous microbatch."""
    from meshwright.comm.collectives import _gather

    before: list[torch.Tensor] = []

    @torch.compiler.disable  # else every call would be compiled anew, for another length of the list
    def late(*args: Any) -> torch.Tensor:
        before.append(_gather(*args))
        return before[-2] if len(before) > 4 and before[-2].shape == before[-1].shape else before[-1]

    eager = functools.partial(torch.compile, backend="eager")  # the fault is the same, and compiling is fast
    with patch("comm.collectives._gather", late), mock.patch("torch.compile", eager):
        yield


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (LayoutSpec(), {"recompute": "full"}),
        pytest.param(
            LayoutSpec(dp_shard=3, zero=3),
            {"accumulation": 2, "finetune": {"method": "qlora", "rank": 4, "dora": True}},
            marks=NEEDS_SHARDED_INTEGERS,
        ),
        (LayoutSpec(dp_replicate=2, cp=2, cp_method="ring"), {"family": "mistral", "recompute": "selective"}),
        (LayoutSpec(dp_shard=2, cp=2, zero=2), {"family": "gpt2", "precision": "fp32"}),
        (LayoutSpec(cp=2, zero=3), {"optimizer": {"name": "muon"}, "clip": 0.01}),
        (LayoutSpec(dp_shard=2), {"precision": "bf16"}),
        (LayoutSpec(pp=2, tp=2), {"tied": True, "recompute": {"full": [1, 0]}}),
        (LayoutSpec(pp=2, dp_shard=2, schedule="zbv"), {"num_layers": 4}),
        (LayoutSpec(cp=2, ep=2), {"family": "mixtral"}),
        (LayoutSpec(pp=2), {"finetune": {"method": "ia3"}}),  # which trains no matrix
    ],
)
def test_right_layouts_are_proved_equal(ranks: RankPool, tmp_path: Path, layout: LayoutSpec, options: Any) -> None:
    proof = prove(ranks, tmp_path, tiny_run(layout, **options))
    assert proof.equal
    assert [comparison.step for comparison in proof.comparisons] == [1, 2]
    assert proof.location is None


EXPERTS, EXPERT = LayoutSpec(dp_shard=2, ep=2), "layers.1.feed_forward.experts.w3.weight"
RING = LayoutSpec(dp_replicate=2, cp=2, cp_method="ring")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("plant", "layout", "options", "phase", "name", "factor"),
    [
        (positions_not_offset, RING, {}, "forward", "input of layers.0.attention.wo", None),
        (tokens_counted_on_this_rank_alone, LayoutSpec(dp_shard=2), {}, "loss", "loss", None),
        (accumulation_not_scaled, LayoutSpec(dp_shard=2), {}, "backward", "norm", 3.0),
        (received_keys_get_no_gradient, RING, {}, "backward", "layers.1.attention.wv", None),
        (gradients_not_summed_over_ranks, RING, {}, "reduction", "norm.weight", None),
        (one_rank_learns_faster, LayoutSpec(dp_shard=2), {}, "update", "output.weight", None),
        (tied_weights_not_summed, LayoutSpec(pp=2), {"tied": True}, "reduction", "tok_embeddings.weight", None),
        (layer_dropped_at_border, LayoutSpec(pp=2), {"num_layers": 4}, "forward", "layers.1", None),
        (experts_gradients_scaled, EXPERTS, {"family": "mixtral"}, "reduction", EXPERT, 2.0),
        (stale_collectives, LayoutSpec(tp=2), {"compile": True, "num_layers": 1}, "forward", "layers.0", None),
    ],
)
def test_planted_faults_are_located(
    ranks: RankPool,
    tmp_path: Path,
    plant: Plant,
    layout: LayoutSpec,
    options: Any,
    phase: str,
    name: str,
    factor: float | None,
) -> None:
    """To plant another strategy's fault: write a function that patches it, and add a row here."""
    proof = prove(ranks, tmp_path, tiny_run(layout, accumulation=3, **options), plant)
    assert not proof.equal
    location = proof.location
    assert location is not None
    assert (location.phase, location.name) == (phase, name)
    if plant is layer_dropped_at_border:
        assert location.difference is None, "no rank computed it"
        return
    assert location.difference is not None
    assert location.difference.by > 1e3 * location.difference.allowed
    if factor is not None:
        assert location.difference.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("fields", "layout", "length"),
    [
        (ModelFields(name="llama-3-8b"), {"dp_shard": 8}, 8192),
        (ModelFields(name="llama-3-8b"), {"dp_replicate": 2, "cp": 8, "cp_method": "ulysses", "zero": 3}, 8192),
        (ModelFields(name="mistral-7b"), {"cp": 4}, 32768),
        (ModelFields(name="gpt2-xl"), {"dp_shard": 2, "cp": 5, "cp_method": "ulysses"}, 1000),
        (ModelFields(name="qwen3-0.6b"), {"cp": 16, "cp_method": "ring"}, 4096),
        (ModelFields(name="llama-3-70b"), {"pp": 4, "dp_shard": 2, "tp": 8, "cp": 2}, 8192),
        (ModelFields(name="mixtral-8x7b"), {"dp_shard": 8, "ep": 4}, 4096),
        (ModelFields(name="deepseek-v3"), {"dp_shard": 4, "tp": 2, "ep": 8}, 4096),
    ],
)
def test_what_is_shrunk_still_fits(fields: ModelFields, layout: dict[str, Any], length: int) -> None:
    degrees = LayoutSpec.model_validate(layout)
    run = tiny_run(degrees, num_layers=2 * degrees.pp)
    model = resolve_model(fields, base_dir=Path())
    data = run.run.data.model_copy(update={"sequence_length": length})
    large = run.model_copy(update={"model": model, "run": run.run.model_copy(update={"data": data}), "accumulation": 7})
    small = shrink(large)
    assert not find_misfits(small.run.layout, small.model, small.run.data.sequence_length)
    assert small.run.layout == large.run.layout
    assert small.model.num_heads * model.num_kv_heads == model.num_heads * small.model.num_kv_heads
    assert small.model.hidden <= 128
    assert any(small.model.is_moe(layer) for layer in range(small.model.num_layers)) == (model.num_experts > 0)
    if model.kv_rank is not None:
        assert small.model.head_dim == small.model.nope_head_dim + small.model.rope_head_dim <= 8
    assert 256 < small.run.data.sequence_length <= 320, "positions that bf16 and a byte cannot tell apart"
    assert small.accumulation == max(3, degrees.pp)
    assert small.model.num_layers == max(2, degrees.pp)
    assert small.global_batch == small.micro_batch * small.accumulation * small.run.layout.data_parallel


@pytest.mark.parametrize(
    ("recompute", "shrunk"),
    [("full", "full"), ({"full": [3, 0]}, {"full": [1, 0]}), ({"full": [8, 0], "selective": 0}, {"full": [1, 0]})],
)
def test_what_is_shrunk_recomputes_as_before(recompute: Any, shrunk: Any) -> None:
    run = tiny_run(LayoutSpec(pp=2), num_layers=16, recompute=recompute)
    small = shrink(run.model_copy(update={"stage_layers": (8, 8)}))
    assert small.run.training.recompute == TrainingSpec.model_validate({"recompute": shrunk}).recompute
    assert len(small.recompute) == small.model.num_layers == 2


def test_what_is_shrunk_starts_from_no_file() -> None:
    run = tiny_run(LayoutSpec())
    start = {"finetune": LoraSpec(method="lora", start_from="adapter"), "checkpoint": CheckpointSpec(start_from="base")}
    small = shrink(run.model_copy(update={"run": run.run.model_copy(update=start)})).run
    assert small.checkpoint.start_from is None
    assert isinstance(small.finetune, LoraSpec)
    assert small.finetune.start_from is None


@pytest.mark.slow
def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "model: llama-3-8b\nlayout: {dp_replicate: 1, cp: 2}\ntraining: {steps: 9, lr_schedule: {warmup: 0}}\n"
    )
    assert main(["verify", str(recipe), "--steps", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["equal"]
    assert len(answer["comparisons"]) == 1
    assert main(["verify", str(recipe), "--steps", "1", "--precision", "recipe"]) == 0
    assert "\nequal: every difference is within the rounding measured on one process (" in capsys.readouterr().out
    assert main(["verify", str(recipe), "--steps", "0"]) == 2
    assert main(["verify", str(recipe), "layout.cp=3", "layout.cp_method=ulysses"]) == 2
    assert "32 heads do not divide" in capsys.readouterr().err
    monkeypatch.setattr(verify_module, "start_workers", lambda *_, **__: 1)
    assert main(["verify", str(recipe), "--steps", "1"]) == 70
    assert "the layout's processes failed, so there is nothing to compare" in capsys.readouterr().err
    monkeypatch.setattr(verify_module, "start_workers", lambda *_, **__: STOPPED)
    assert main(["verify", str(recipe), "--steps", "1"]) == STOPPED
    assert capsys.readouterr().err == "stopped before the proof was complete\n"


@pytest.mark.parametrize(("gpus", "device"), [(1, "cuda_shared"), (2, "cuda")])
def test_the_layout_runs_on_the_gpus_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    """One process computes on the CPU either way."""
    recipe, started = tmp_path / "run.yaml", []
    recipe.write_text("model: llama-3-8b\nlayout: {dp_replicate: 2}\ntraining: {steps: 9, lr_schedule: {warmup: 0}}")
    monkeypatch.setattr(verb, "find_machine", lambda device: Machine("gpu", "NVIDIA H100", gpus, 80 * 2**30))
    monkeypatch.setattr(verify_module, "start_workers", lambda run, *_, **__: started.append(run.device) or 1)
    assert main(["verify", str(recipe), "--steps", "1", "--device", "cuda"]) == 70
    assert started == [device]
    shared = "; ranks share them, messages go through host memory" if gpus == 1 else ""
    assert f"layout     DDP x 2; processes: 2 on {gpus} x NVIDIA H100{shared}\n" in capsys.readouterr().out


def test_the_last_bit_of_stored_weights_is_rounding() -> None:
    """`verify --precision recipe` called layouts different whose smallest updates differed in few weights' last bit,
    which none of the measured runs had moved."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 32, generator=generator) * 0.02
    change = 1e-7 * torch.randn(64, 32, generator=generator)  # about fifty times the last bit

    def judged(ours: torch.Tensor) -> bool:
        part = PartSums.of(ours, start + change, torch.zeros(()), start)
        return all(one.equal for one in judge([{"w": part}], {"w": 0.0})["w"])

    moved = start + change
    flipped = torch.where(torch.rand(64, 32, generator=generator) < 0.01, torch.nextafter(moved, torch.ones(())), moved)
    assert not torch.equal(flipped, moved)
    assert judged(flipped)
    assert not judged(start + 1.05 * change)
    assert not judged(start)
