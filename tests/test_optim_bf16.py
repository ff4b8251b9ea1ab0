"""Weights and moments in bf16: rounding right on average, the same under every layout, continued from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.optim.adamw import AdamWBf16
from meshwright.optim.bf16 import AT_ONCE, Bf16, places, round_at_random
from meshwright.predict.engine import engine_stack
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from test_optim_8bit import three_steps
from test_resume import differences, on_ranks, resumed, tiny
from tiny import tiny_run

CONSTANTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
PURE: dict[str, Any] = {"precision": "bf16", "master_dtype": "bf16"}


def pure(rounding: str = "stochastic", state: str = "bf16", name: str = "adamw") -> dict[str, Any]:
    state = "fp32" if name == "adamw_8bit" else state
    return {**PURE, "optimizer": {"name": name, "rounding": rounding, "state_dtype": state, "weight_decay": 0.1}}


def test_random_rounding_is_right_on_average() -> None:
    value = 1 + 0.3 * 2.0**-7  # three tenths of the way to the next number
    rounded = round_at_random(torch.full((1000, 100), value), torch.randint(2**31, (1000, 100), dtype=torch.int32))
    assert set(rounded.flatten().tolist()) == {1.0, 1 + 2.0**-7}
    assert rounded.double().mean().item() == pytest.approx(value, abs=4 * 2.0**-7 * 0.46 / 100000**0.5)
    kept = torch.tensor([0.0, -3.5, 2.0**-130, float("inf")])
    assert torch.equal(round_at_random(kept, torch.full((4,), 2**31 - 1, dtype=torch.int32)), kept)


@pytest.mark.parametrize(
    ("rounding", "expected", "apart"), [("nearest", 1.0, 0.0), ("stochastic", 0.99, 0.0005), ("kahan", 0.99, 2.0**-9)]
)
def test_updates_smaller_than_a_weights_last_bit(rounding: Any, expected: float, apart: float) -> None:
    """A hundred steps of 1e-4 from 1, whose lower neighbour in bf16 is 0.0039 away."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    optimizer = AdamWBf16([weight], **{**CONSTANTS, "lr": 1e-4})
    optimizer.bf16 = Bf16(rounding=rounding, names={id(weight): "weight"})
    for _ in range(100):
        weight.grad = torch.ones(64, 64)
        optimizer.step()
    assert weight.double().mean().item() == pytest.approx(expected, abs=apart)
    if rounding == "kahan":
        kept = weight.float() + optimizer.state[weight]["compensation"]
        assert kept.double().sub(0.99).abs().max() < 100 * 2.0**-18


def test_moments_do_not_stall() -> None:
    """With beta2 of 0.999, a second moment falls per step by less than half the gap between bf16 numbers."""
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = AdamWBf16([weight], **{**CONSTANTS, "betas": (0.9, 0.999)})
    optimizer.bf16 = Bf16(moments=True, names={id(weight): "weight"})
    weight.grad = torch.ones(64, 64)
    optimizer.step()
    for _ in range(300):
        weight.grad = torch.zeros(64, 64)
        optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert second.double().mean().item() == pytest.approx(0.001 * 0.999**300, rel=0.01)


@pytest.mark.parametrize("at_once", [2**20, 30])
def test_steps_in_fp32_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(7, 3, 5, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine, reference = (
        make([weight], **CONSTANTS, weight_decay=0.1)
        for make, weight in ((AdamWBf16, ours), (torch.optim.AdamW, theirs))
    )
    for _ in range(3):
        ours.grad = torch.randn(7, 3, 5, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_every_number_has_a_place() -> None:
    numbers, first = places(torch.empty(4, 3, 5))
    assert (numbers.tolist(), first) == (list(range(12)), 0)
    assert places(torch.empty(6))[0].tolist() == list(range(6))
    assert places(torch.empty(0, 5))[0].tolist() == []


LAYOUT_CASES = [
    ("ddp", pure()),
    ("zero-1", pure("kahan", "fp32")),
    ("zero-2", pure("nearest")),
    ("zero-3-tp-uneven", pure()),
    ("hybrid-3-tp", pure(name="muon")),
    ("pp-zero-3", pure("kahan")),
    ("zero-3-tp", pure(name="adamw_8bit")),
    ("zero-3", {"precision": "bf16", "optimizer": {"state_dtype": "bf16"}}),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(*case, id=case[0], marks=[] if case[0] == "zero-3-tp-uneven" else pytest.mark.slow)
        for case in LAYOUT_CASES
    ],
)
def test_every_layout_rounds_alike(ranks: RankPool, layout: str, options: dict[str, Any]) -> None:
    """Weights, moments and compensation after three steps, bit for bit, given the same gradients."""
    width = 512 if options["optimizer"].get("name") == "adamw_8bit" else 24
    family = "mixtral" if layout == "zero-3" else "llama"
    expected = three_steps(tiny_run(LayoutSpec(), width=width, num_layers=2, family=family, **options))
    run = tiny_run(LAYOUTS[layout], width=width, num_layers=2, family=family, **options)
    parts = ranks.run(LAYOUTS[layout].world_size, three_steps, run)
    found = {key: value for part in parts for key, value in part.items()}
    assert found.keys() == expected.keys()
    assert not [key for key in found if not torch.equal(found[key], expected[key])]
    assert torch.bfloat16 in {value.dtype for value in found.values()}


def kept_gradients(run: ResolvedRun) -> set[torch.dtype]:
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    return {parameter.grad.dtype for parameter in trainer.parameters.values() if parameter.grad is not None}


@pytest.mark.parametrize("layout", ["single", "zero-3"])
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gradients_are_added_up_in_what_they_are_reduced_in(ranks: RankPool, layout: str, reduce: str) -> None:
    run = tiny_run(LAYOUTS[layout], accumulation=3, reduce_dtype=reduce, **pure())
    assert ranks.run(run.run.layout.world_size, kept_gradients, run)[0] == {
        {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce]
    }


@pytest.mark.exhaustive
def test_a_run_continues_bit_for_bit_and_elsewhere(ranks: RankPool, tmp_path: Path) -> None:
    options = pure("kahan")
    assert not any(on_ranks(ranks, differences, tiny("zero-3", **options), tmp_path, [2]))
    [elsewhere] = resumed(tiny("single", **options), tmp_path, [2])
    assert len(elsewhere.losses) == 2


@pytest.mark.parametrize("options", [pure("kahan"), pure(), pure("stochastic", "fp32"), pure(name="adamw_8bit")])
def test_the_planner_knows_what_is_kept(options: dict[str, Any]) -> None:
    trainer = build_here(tiny_run(LayoutSpec(), width=512, num_layers=1, **options))
    weight = trainer.parameters["layers.0.feed_forward.w1.weight"]
    kept = weight.nbytes + sum(tensor.nbytes for tensor in trainer.optimizers.state_of(weight).values() if tensor.dim())
    stack = engine_stack(trainer.resolved.run.training, alone=True)
    assert kept == stack.state_bytes * weight.numel()
    assert (stack.gradient_bytes, stack.weight_bytes) == (4, 0)


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"precision": "fp16", "master_dtype": "bf16"}, "this one computes in fp16; set precision=bf16"),
        ({"optimizer": {"rounding": "kahan"}}, "these are in fp32; set master_dtype=bf16"),
        ({"master_dtype": "bf16", "optimizer": {"name": "paged_adamw"}}, "which rounds by itself"),
        ({"optimizer": {"name": "adamw_8bit", "state_dtype": "bf16"}}, "are 8-bit; use adamw"),
        ({"precision": "fp64", "optimizer": {"state_dtype": "bf16"}}, "fp64, which is for proofs"),
    ],
)
def test_what_makes_no_sense_is_refused(training: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingSpec.model_validate(training)


def test_a_run_that_is_computed_again_keeps_its_state_in_fp32() -> None:
    with pytest.raises(ValueError, match=r"under training\.master_dtype=bf16, rounding may look like a fault"):
        Run.model_validate({"model": "gpt2-124m", "training": PURE, "guards": {"verify_every": 5}})
