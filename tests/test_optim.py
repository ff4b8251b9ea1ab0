"""Optimizers, schedules and the gradient norm, compared with torch's own and with formulas."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.families import parameter_table
from meshwright.optim.build import build_optimizers
from meshwright.optim.clip import global_gradient_norm, scale_gradients
from meshwright.optim.muon import Muon, orthogonalise
from meshwright.optim.schedule import lr_factor
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import Processor, engine_job
from meshwright.predict.memory import predict_memory
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.training import LrScheduleSpec, OptimizerSpec, TrainingSpec
from meshwright.testing.equivalence import build_here
from meshwright.testing.ranks import RankPool
from tiny import STRATEGIES, tiny_run


def test_muon_steps_as_torchs_own() -> None:
    """torch iterates in bf16, which keeps 8 bits: five iterations agree to a few percent of the step."""
    torch.manual_seed(0)
    start = [torch.randn(12, 20), torch.randn(20, 12)]
    ours = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    mine = Muon(ours, lr=0.1, momentum=0.95, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, momentum=0.95, weight_decay=0.1, nesterov=True)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, before in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.05 * (a - before).norm()


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, dtype=torch.float64), 5))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=r"only matrices, not a tensor of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_who_decays_and_who_goes_to_muon(family: str) -> None:
    trainer = build_here(tiny_run(LayoutSpec(), family=family))
    names = {id(tensor): name for name, tensor in trainer.parameters.items()}

    def groups(spec: OptimizerSpec) -> dict[tuple[str, float], set[str]]:
        optimizers = build_optimizers(spec, parameter_table(trainer.resolved.model), trainer.parameters)
        return {
            (type(optimizer).__name__, group["weight_decay"]): {names[id(p)] for p in group["params"]}
            for optimizer in optimizers.optimizers
            for group in optimizer.param_groups
        }

    adamw = groups(OptimizerSpec(weight_decay=0.1))
    assert adamw["ShardedAdamW", 0.0] == {n for n in trainer.parameters if "norm" in n or n.endswith(".bias")}
    assert adamw["ShardedAdamW", 0.0] | adamw["ShardedAdamW", 0.1] == set(trainer.parameters)
    muon = groups(OptimizerSpec(name="muon", weight_decay=0.1))
    assert muon["Muon", 0.1] == {
        n for n in trainer.parameters if n.startswith("layers.") and n not in adamw["ShardedAdamW", 0.0]
    }
    assert "tok_embeddings.weight" in muon["ShardedAdamW", 0.1]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LrScheduleSpec(name="constant", warmup=4), {1: 0.25, 4: 1, 50: 1, 100: 1}),
        (LrScheduleSpec(name="linear", warmup=0, final=0), {1: 0.99, 50: 0.5, 100: 0}),
        (LrScheduleSpec(name="linear", warmup=20, final=0.2), {10: 0.5, 20: 1, 60: 0.6, 100: 0.2}),
        (LrScheduleSpec(name="cosine", warmup=20, final=0.1), {20: 1, 60: 0.55, 100: 0.1}),
        (LrScheduleSpec(name="wsd", warmup=10, final=0, decay=40), {5: 0.5, 10: 1, 60: 1, 80: 0.5, 100: 0}),
        (LrScheduleSpec(name="wsd", warmup=10, final=0), {80: 1, 90: 0.5, 100: 0}),
        (LrScheduleSpec(name="constant"), {5: 0.5, 10: 1}),
    ],
)
def test_schedules(schedule: LrScheduleSpec, expected: dict[int, float]) -> None:
    for step, factor in expected.items():
        assert lr_factor(schedule, step, 100) == pytest.approx(factor, abs=1e-12), step


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (999, 99), (1000, 100), (10**6, 100)])
def test_warm_up_that_is_left_open_follows_the_length_of_the_run(steps: int, warmup: int) -> None:
    assert LrScheduleSpec().warmup_steps(steps) == warmup
    assert TrainingSpec(steps=steps).steps == steps, "no length is refused for it"


@pytest.mark.parametrize(("steps", "warmup"), [(100, "auto"), (37, 11), (37, 2), (5, 5)])
def test_one_cycle_is_torchs(steps: int, warmup: Any) -> None:
    schedule = LrScheduleSpec(name="one_cycle", warmup=warmup, initial=1 / 25, final=1 / 25e4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    share = schedule.warmup_steps(steps) / steps
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3.0, total_steps=steps, pct_start=share)
    for step in range(1, steps + 1):
        assert 3 * lr_factor(schedule, step, steps) == pytest.approx(torchs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        if step < steps:
            torchs.step()


def test_cosine_is_a_cosine() -> None:
    schedule = LrScheduleSpec(name="cosine", warmup=0, final=0)
    assert lr_factor(schedule, 25, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_gradient_norm_without_gradients_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        global_gradient_norm([torch.nn.Parameter(torch.zeros(2))])


def test_scaling_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert global_gradient_norm([parameter]) == 5
    scale_gradients([parameter], 0.2)
    assert global_gradient_norm([parameter]).item() == pytest.approx(1)


def bytes_kept(name: str) -> int:
    """Bytes of weights and optimizer state that this rank keeps between steps. Collective."""
    trainer = build_here(tiny_run(STRATEGIES[name], precision="fp32"))
    tensors = [
        tensor
        for parameter in trainer.parameters.values()
        for tensor in (parameter, *trainer.optimizers.state_of(parameter).values())
        if tensor.dim()
    ]
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "zero-3-uneven"])
def test_ranks_keep_between_steps_what_the_table_predicts(ranks: RankPool, name: str) -> None:
    """Weights and AdamW's two moments; if rows do not divide evenly, ranks keep different numbers."""
    layout = STRATEGIES[name]
    run = tiny_run(layout, precision="fp32")
    job = engine_job(
        run.run, blueprint(run.model), global_batch=run.global_batch, micro_batch=1, processor=Processor("cpu")
    )
    predicted = predict_memory(
        job.with_layout(offload="none")
    )  # stored on the device or, if offloaded, in another place
    kept = ranks.run(layout.world_size, bytes_kept, name)
    assert sum(kept) / len(kept) == pytest.approx(predicted.optimizer, rel=1e-4)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)])
def test_the_norm_of_all_gradients_on_a_device_is_the_norm_of_one_after_another(monkeypatch, dtypes) -> None:
    """A GPU's are taken together; the host's one after another, because they may be on disk."""
    parameters = []
    for number in range(6):
        parameter = torch.nn.Parameter(torch.randn(5 + number, 7).to(dtypes[number % len(dtypes)]))
        parameter.grad = torch.randn_like(parameter)
        parameters.append(parameter)
    expected = torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm()
    one_by_one = global_gradient_norm(parameters)
    monkeypatch.setattr("meshwright.optim.clip.on_cpu", lambda gradient: False)
    together = global_gradient_norm(parameters)
    # Sums of 300 squares in fp32: 300 units in the last place, halved by the root.
    torch.testing.assert_close(one_by_one.double(), expected, rtol=150 * 2**-24, atol=0)
    torch.testing.assert_close(together.double(), expected, rtol=150 * 2**-24, atol=0)
