"""Expert parallelism compared with one process; ranks and experts without tokens; refusals."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.families import parameter_table
from meshwright.families.split import kept_shape
from meshwright.models.moe import Experts, Router, Rows
from meshwright.parallel.expert import Exchange, _keep_own_experts
from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, build_here, largest_difference, loader_for, one_step, whole
from meshwright.testing.layouts import EXPERT_PARALLEL
from meshwright.testing.ranks import RankPool
from test_equivalence import alone, assert_equal
from test_resume import STEPS, on_ranks, resumed, uninterrupted
from test_tensor_parallel import kept
from tiny import EPS, GLOBAL_BATCH, LR, tiny_run

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe")
RECOMPUTES = ("none", "selective", "full")


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_PARALLEL)
def test_every_layout(ranks: RankPool, name: str) -> None:
    """Families, recomputation, accumulation and tied embeddings alternate."""
    layout, turn = EXPERT_PARALLEL[name], list(EXPERT_PARALLEL).index(name)
    several = 2 if GLOBAL_BATCH // layout.data_parallel % 2 == 0 else 3
    options: dict[str, Any] = {"family": FAMILIES[turn % len(FAMILIES)], "tied": turn % 2 == 0}
    run = tiny_run(layout, accumulation=(1, several)[turn // 2 % 2], recompute=RECOMPUTES[turn // 3 % 3], **options)
    assert_equal(ranks.run(layout.world_size, one_step, run)[0], alone(**options))


Z_LOSS = {
    "hybrid-ep": ("mixtral", "none"),
    "tp-without-ep": ("qwen3_5_moe", "selective"),
    "cp-tp-ep": ("gpt_oss", "full"),
    "pp-tp-ep": ("qwen3_next", "none"),
    "pp-zero-bubble-ep": ("mixtral", "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", Z_LOSS)
def test_the_routers_z_loss(ranks: RankPool, name: str) -> None:
    """Where ranks share experts, sequences or layers, as on one process, where it changes the gradient."""
    layout, (family, recompute) = EXPERT_PARALLEL[name], Z_LOSS[name]
    options: dict[str, Any] = {"family": family, "z_loss": 0.5}
    expected = alone(**options)
    run = tiny_run(layout, accumulation=2, recompute=recompute, **options)
    assert_equal(ranks.run(layout.world_size, one_step, run)[0], expected)
    assert largest_difference(expected.gradients, alone(family=family).gradients)[0] > 1e-3


@pytest.mark.parametrize("name", ["zero-3-ep", "zero-3-cp-ep", "tp-without-ep", "zero-3-tp-ep", "cp-tp-ep"])
def test_every_rank_keeps_exactly_what_the_table_says(ranks: RankPool, name: str) -> None:
    layout = EXPERT_PARALLEL[name]
    run = tiny_run(layout, family="mixtral")
    for (_, tp_rank, shard_rank), shapes in ranks.run(layout.world_size, kept, run):
        expected = {
            row.name: [kept_shape(row, run.model, layout, tp_rank=tp_rank, shard_rank=shard_rank)] * 4
            for row in parameter_table(run.model)
        }
        assert shapes == expected


def compiled(run: ResolvedRun) -> Outcome | None:
    """A first step with compiled blocks, without code generation, which would be slow. Collective."""
    traced = []

    def note_tracing(experts: Experts, x_MD: torch.Tensor, rows: Rows) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return run_experts(experts, x_MD, rows)

    run_experts = Experts.forward
    with (
        mock.patch("torch.compile", functools.partial(torch.compile, backend="eager")),
        mock.patch.object(Experts, "forward", note_tracing),
    ):
        outcome = one_step(run)
    assert traced
    assert not any(traced)
    return outcome


@pytest.mark.slow
def test_compiled(ranks: RankPool) -> None:
    """Attention is compiled; experts are not, because the router decides their shapes."""
    run = tiny_run(LayoutSpec(dp_shard=2, ep=2), family="mixtral", compile=True)
    assert_equal(ranks.run(2, compiled, run)[0], alone(family="mixtral"))


@pytest.mark.slow
def test_muon_leaves_experts_to_adamw(ranks: RankPool) -> None:
    """As on one process; see `test_equivalence.test_muon` for the slope."""
    options: dict[str, Any] = {
        "family": "mixtral",
        "optimizer": {"name": "muon", "lr": LR, "eps": EPS, "muon_lr": 0.02},
    }
    expected = alone(**options)
    smallest = min(gradient.norm().item() for gradient in expected.gradients.values() if gradient.dim() == 2)
    outcome = ranks.run(4, one_step, tiny_run(LayoutSpec(dp_shard=2, tp=2, ep=2), **options))[0]
    assert_equal(outcome, expected, slope=0.02 * 485 / smallest)


def expert_load(run: ResolvedRun) -> tuple[float | None, float]:
    """`expert_load` of a first step, and the count of a hook on every router. Collective."""
    trainer = build_here(run)
    counts: dict[int, torch.Tensor] = {}

    def count(router: Router, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        counts[router.layer] = counts.get(router.layer, 0) + output[2].sum(0)

    for module in trainer.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(count)
    with loader_for(trainer) as loader:
        told = trainer.train_step(1, loader.microbatches(0)).expert_load
    return told, max(((n.max() / n.double().mean()).item() for n in counts.values()), default=0.0)


@pytest.mark.slow
def test_expert_load_is_that_of_the_global_batch(ranks: RankPool) -> None:
    """Also in a layer that only the second stage has: the first layer of this model is dense."""
    told, counted = expert_load(tiny_run(LayoutSpec(), family="deepseek_v3"))
    assert told == pytest.approx(counted)
    assert counted > 1.2
    run = tiny_run(LayoutSpec(pp=2, tp=2, ep=2), family="deepseek_v3", accumulation=3)
    for answer, _ in ranks.run(4, expert_load, run):
        assert answer == pytest.approx(counted)
    assert expert_load(tiny_run(LayoutSpec())) == (None, 0.0)


def test_fp32(ranks: RankPool) -> None:
    layout = LayoutSpec(dp_shard=4, ep=2)
    options = {"family": "mixtral", "precision": "fp32"}
    outcome = ranks.run(layout.world_size, one_step, tiny_run(layout, **options))[0]
    assert_equal(outcome, alone(**options), dtype=torch.float32)


def wrongly_scaled(run: ResolvedRun) -> Outcome | None:
    """One step with the experts' gradients divided by the number of ranks that share the experts."""
    trainer = build_here(run)
    for module in trainer.model.modules():
        if isinstance(module, Experts):
            module.set_gradient_divide_factor(run.run.layout.ep)  # type: ignore[operator]
    with loader_for(trainer) as loader:
        loss, _ = trainer.train_step.gradients(loader.microbatches(0))
    gradients = {name: whole(tensor.grad) for name, tensor in trainer.parameters.items()}
    weights = {name: whole(tensor.detach()) for name, tensor in trainer.parameters.items()}
    return Outcome(loss, 0.0, gradients, weights) if dist.get_rank() == 0 else None


def test_gradients_scaled_by_the_wrong_degree_are_seen(ranks: RankPool) -> None:
    outcome = ranks.run(4, wrongly_scaled, tiny_run(LayoutSpec(dp_shard=4, ep=2), family="mixtral"))[0]
    expected = alone(family="mixtral")
    with pytest.raises(AssertionError, match="experts"):
        assert_equal(replace(outcome, gnorm=expected.gnorm), expected)


COUNTS = {
    "even": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "one rank gets everything": [[3, 2, 0, 0], [1, 4, 0, 0]],
    "one rank has nothing": [[2, 0, 3, 1], [0, 0, 0, 0]],
    "one expert gets nothing": [[2, 0, 3, 1], [1, 0, 2, 2]],
    "nobody has anything": [[0, 0, 0, 0], [0, 0, 0, 0]],
}
"""The number of rows that each of two ranks sends to each of four experts."""


def exchange_errors(cases: list[list[list[int]]], dtype: torch.dtype) -> list[float]:
    """The largest difference of rows, their gradients and the experts', between two ranks and one with all experts."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.get_rank()
    return [_exchange_error(torch.tensor(case), dtype, mesh, rank) for case in cases]


def _exchange_error(counts_RE: torch.Tensor, dtype: torch.dtype, mesh: Any, rank: int) -> float:
    torch.manual_seed(0)
    spec = tiny_run(LayoutSpec(), family="mixtral").model.model_copy(update={"num_experts": 4})
    every, own = (Experts(spec).to(dtype) for _ in range(2))
    for linear, theirs in zip(own.children(), every.children(), strict=True):
        torch.nn.init.normal_(theirs.weight)
        _keep_own_experts(linear, mesh)  # type: ignore[arg-type]
        linear.weight.to_local().data.copy_(theirs.weight.chunk(2)[rank])
    rows = [torch.randn(int(counts.sum()), spec.hidden, dtype=dtype, requires_grad=True) for counts in counts_RE]
    expected = [every(x, Rows(counts[:, None])) for x, counts in zip(rows, counts_RE, strict=True)]
    weights = [torch.randn_like(y) for y in expected]
    torch.autograd.backward(expected, weights)
    x = rows[rank].detach().clone().requires_grad_()
    y = Exchange(mesh.get_group())(own, x, counts_RE[rank])
    y.backward(weights[rank])
    pairs = [(y, expected[rank]), (x.grad, rows[rank].grad)]
    for linear, theirs in zip(own.children(), every.children(), strict=True):
        assert isinstance(linear.weight.grad, DTensor)
        pairs.append((linear.weight.grad.to_local(), theirs.weight.grad.chunk(2)[rank]))
    return max((ours - theirs).abs().max().item() if ours.numel() else 0.0 for ours, theirs in pairs)


def test_uneven_routing(ranks: RankPool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-2)):  # gradients are about 1e3
        for errors in ranks.run(2, exchange_errors, list(COUNTS.values()), dtype):
            assert dict(zip(COUNTS, (error < tolerance for error in errors), strict=True)) == dict.fromkeys(
                COUNTS, True
            )


def saved_run(layout: LayoutSpec) -> ResolvedRun:
    options: dict[str, Any] = {"family": "mixtral", "lr_schedule": {"name": "cosine", "warmup": 2}, "steps": STEPS}
    return tiny_run(layout, **options)


@pytest.mark.exhaustive
def test_checkpoints_are_of_no_layout(ranks: RankPool, tmp_path: Path) -> None:
    """Saved with shared experts, continued with different sharing and by one process; and the reverse."""
    layouts = EXPERT_PARALLEL | {"alone": LayoutSpec()}
    for saver, loaders in (("zero-3-ep", ("alone", "zero-3-cp-ep")), ("alone", ("zero-3-tp-ep",))):
        whole = on_ranks(ranks, uninterrupted, saved_run(layouts[saver]), tmp_path / saver)[0]
        for loader in loaders:
            (again,) = on_ranks(ranks, resumed, saved_run(layouts[loader]), tmp_path / saver, (3,))[0]
            assert again.losses == [pytest.approx(step, rel=1e-10) for step in whole.losses[3:]]
            assert largest_difference(again.weights, whole.weights)[0] < 1e-10


@pytest.mark.parametrize(
    ("layout", "family", "message"),
    [
        ({"dp_shard": 4, "ep": 4}, "llama", "layout.ep=4: llama has no experts; .* ep=1"),
        ({"dp_shard": 6, "ep": 3}, "mixtral", "8 experts cannot be split evenly over 3 ranks; .* ep=2"),
        ({"dp_shard": 14, "ep": 2}, "mixtral", "7 ranks share the state of the same experts, .*hidden=24; .* ep=1"),
    ],
)
def test_what_does_not_fit_is_refused(layout: dict[str, Any], family: str, message: str) -> None:
    (found,) = find_misfits(LayoutSpec.model_validate(layout), tiny_run(LayoutSpec(), family=family).model, 16)
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_a_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ep=3 does not divide dp_shard x cp x tp = 4, .* ep=1"):
        LayoutSpec(dp_shard=4, ep=3)
