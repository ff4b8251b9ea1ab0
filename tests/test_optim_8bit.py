"""AdamW in eight bits: bitsandbytes' step bit for bit, the same under every layout, resumed from a checkpoint."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.dtypes import torch_dtype
from meshwright.models.init import draw_rows
from meshwright.optim.adamw_8bit import AdamW8bit, block_size
from meshwright.optim.paged_adamw import PagedAdamW
from meshwright.optim.shards import local, part_like, whole
from meshwright.predict.engine import engine_stack
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from test_blockwise import portable_quantize_blockwise
from test_resume import differences, on_ranks, resumed, tiny
from tiny import tiny_run

logging.disable(logging.WARNING)  # bitsandbytes warns that it finds no CPU kernel
bitsandbytes = pytest.importorskip("bitsandbytes")
logging.disable(logging.NOTSET)

OPTIMIZER = {"name": "adamw_8bit", "lr": 1e-2, "weight_decay": 0.1}
WIDE = 128
"""A width that makes matrices large enough for eight bits."""


def test_steps_are_those_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(
        values: torch.Tensor, book: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, block: int
    ) -> None:
        found, largest = portable_quantize_blockwise(values, book, block)
        codes.copy_(found)
        scales.copy_(largest)

    monkeypatch.setattr("bitsandbytes.backends.cpu.ops._quant_blockwise_fp32_direct", quantize)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(48, 512, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    constants: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    mine, reference = AdamW8bit([ours], **constants), bitsandbytes.optim.AdamW8bit([theirs], **constants)
    for _ in range(5):
        ours.grad = torch.randn(start.shape, generator=generator) * torch.rand(start.shape, generator=generator) ** 4
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    state, their_state = mine.state[ours], reference.state[theirs]
    assert torch.equal(state["exp_avg"], their_state["state1"])
    assert torch.equal(state["exp_avg_sq"], their_state["state2"])
    assert torch.equal(state["exp_avg_scale"].flatten(), their_state["absmax1"])
    assert torch.equal(state["exp_avg_sq_scale"].flatten(), their_state["absmax2"])
    assert torch.equal(ours, theirs)
    assert (ours - start).abs().mean() > 1e-3


def test_what_stays_in_fp32() -> None:
    sizes = {(512,): None, (64, 8): None, (512, 8): None, (256, 16): 16, (40, 384): 128, (8, 16, 768): 256}
    assert {size: block_size(torch.empty(size)) for size in sizes} == sizes


def three_steps(run: ResolvedRun) -> dict[str, torch.Tensor]:
    """Weights and states, whole, after three steps with the same random gradients under every layout."""
    trainer = build_here(run)
    rows, dtype = {row.name: row for row in trainer.table}, torch_dtype(run.run.training.dtypes.gradient)
    for step in range(3):
        for name, parameter in trainer.parameters.items():
            gradient = draw_rows(rows[name], step + 100, 0, rows[name].shape[0]).to(dtype)
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            local(parameter.grad).copy_(part_like(gradient, parameter))
        trainer.optimizers.step()
    found = {name: whole(parameter.detach()).clone() for name, parameter in trainer.parameters.items()}
    for name, parameter in trainer.parameters.items():
        states = trainer.optimizers.state_of(parameter)
        found |= {f"{name}.{key}": whole(state).clone() for key, state in states.items()}
    return found


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), [("zero-3-uneven", WIDE), ("hybrid-3", WIDE), ("zero-3-tp", 512)])
def test_every_layout_keeps_the_same_bits(ranks: RankPool, name: str, width: int) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "width": width, "num_layers": 1}
    expected = three_steps(tiny_run(LayoutSpec(), **options))
    assert expected["layers.0.attention.wo.weight.exp_avg"].dtype == torch.uint8
    found = ranks.run(LAYOUTS[name].world_size, three_steps, tiny_run(LAYOUTS[name], **options))[0]
    assert found.keys() == expected.keys()
    different = [key for key in found if not torch.equal(found[key], expected[key])]
    assert not different


def kinds_of_moments(run: ResolvedRun) -> dict[str, torch.dtype]:
    trainer = build_here(run)
    return {name: trainer.optimizers.state_of(p)["exp_avg"].dtype for name, p in trainer.parameters.items()}


def test_blocks_that_tensor_parallelism_would_cut_stay_in_fp32(ranks: RankPool) -> None:
    run = tiny_run(LAYOUTS["tp"], optimizer=OPTIMIZER, width=WIDE, num_layers=1)
    kinds = ranks.run(LAYOUTS["tp"].world_size, kinds_of_moments, run)[0]
    assert kinds["layers.0.attention.wq.weight"] == torch.uint8
    assert kinds["layers.0.attention.wo.weight"] == torch.float32


@pytest.mark.exhaustive
def test_a_run_continues_bit_for_bit_from_every_step(ranks: RankPool, tmp_path: Path) -> None:
    run = tiny("zero-3", optimizer=OPTIMIZER, width=WIDE, num_layers=1)
    assert not any(on_ranks(ranks, differences, run, tmp_path))
    [elsewhere] = resumed(tiny("single", optimizer=OPTIMIZER, width=WIDE, num_layers=1), tmp_path, [2])
    assert len(elsewhere.losses) == 2


def test_paged_steps_are_those_of_adamw() -> None:
    """On a CPU nothing is paged; the step is the same."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    constants: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    mine, reference = PagedAdamW([ours], **constants), torch.optim.AdamW([theirs], **constants)
    for _ in range(5):
        ours.grad = torch.randn(40, 30, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert mine.state[ours]["step"] == 5


@pytest.mark.parametrize("layout", [LayoutSpec(), LayoutSpec(dp_shard=2)])
def test_paging_is_refused_where_there_is_none(layout: LayoutSpec) -> None:
    run = tiny_run(layout, optimizer={"name": "paged_adamw"}).run
    with pytest.raises(ValueError, match="needs one process on an NVIDIA GPU; adamw_8bit needs little"):
        resolve_run(run, base_dir=Path())


def test_paging_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ValueError, match=r"meshwright\[qlora\]"):
        PagedAdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def test_the_planner_knows_what_moments_take() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), optimizer=OPTIMIZER, width=512, num_layers=1, precision="fp32"))
    weight = trainer.parameters["layers.0.feed_forward.w1.weight"]
    kept = weight.nbytes + sum(tensor.nbytes for tensor in trainer.optimizers.state_of(weight).values() if tensor.dim())
    assert kept == engine_stack(trainer.resolved.run.training, alone=True).state_bytes * weight.numel()
