"""The choice among a CPU's kernels: by measurement, kept for resumed runs, the same on every rank, none in proofs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models import kernel_choice
from meshwright.models.cpu_kernels import CHOSEN, FIXED, Kernels
from meshwright.models.kernel_choice import FILE, MeasuredKernels, Shapes, kept, measure, read, using
from meshwright.models.linear import Linear
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.trainer.kernels import measured_kernels, shapes_of
from meshwright.trainer.setup import RankContext
from tiny import tiny_run

SMALL = Shapes(tokens=8, into=16, out=32, heads=4, shared=2, length=16, width=8, dtype=torch.float32)
SLOW = {"onednn": 3.0, "mkl": 1.0, "blocks": 2.0, "torch": 5.0}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measurements, whose results are `SLOW`."""
    asked: list[list[str]] = []

    def in_turns(actions: dict[str, Any]) -> dict[str, float]:
        asked.append(list(actions))
        for action in actions.values():
            action()
        return {name: SLOW[name] for name in actions}

    monkeypatch.setattr(kernel_choice, "_in_turns", in_turns)
    return asked


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        (torch.float32, Kernels(products="mkl")),
        (torch.bfloat16, Kernels(attention="blocks")),
        (torch.float64, FIXED),
        (torch.float16, FIXED),
    ],
)
def test_the_faster_kernel_is_chosen(timed: list[list[str]], dtype: torch.dtype, kernels: Kernels) -> None:
    measured = measure(replace(SMALL, dtype=dtype))
    assert measured.kernels == kernels
    assert bool(measured.milliseconds) == bool(timed) == (dtype in (torch.float32, torch.bfloat16))
    assert CHOSEN.get() == FIXED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measurement_takes_milliseconds_and_leaves_nothing(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    measured = measure(replace(SMALL, dtype=dtype))
    assert all(milliseconds >= 0 for milliseconds in measured.milliseconds.values())
    assert len(measured.milliseconds) == 2
    assert (CHOSEN.get(), torch.get_num_threads()) == (FIXED, threads)


def test_a_choice_is_kept(timed: list[list[str]], tmp_path: Path) -> None:
    """So that a resumed run gives the same bits, although another measurement may choose otherwise."""
    first = kept(SMALL, tmp_path)
    assert kept(SMALL, tmp_path) == first == MeasuredKernels(Kernels(products="mkl"), {"onednn": 3.0, "mkl": 1.0})
    assert len(timed) == 1
    kept(replace(SMALL, out=64), tmp_path)
    assert len(timed) == 2
    (tmp_path / FILE).write_text("{")
    assert read(tmp_path / FILE) == {}
    assert kept(SMALL, tmp_path) == first
    assert len(timed) == 3
    entries = json.loads((tmp_path / FILE).read_text())
    (key,) = entries
    entries[key]["kernels"]["products"] = "rm -rf"
    (tmp_path / FILE).write_text(json.dumps(entries))
    assert kept(SMALL, tmp_path) == first


def test_what_is_chosen_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    by: list[str] = []
    real = kernel_choice.linear.__globals__["_onednn"]
    monkeypatch.setitem(kernel_choice.linear.__globals__, "_onednn", lambda *args: by.append("onednn") or real(*args))
    layer, x = Linear(8, 8), torch.randn(4, 8)
    layer(x)
    assert by == ["onednn"]
    with using(Kernels(products="mkl")):
        layer(x).sum().backward()
    assert by == ["onednn"]


@pytest.mark.parametrize(("deterministic", "kernels"), [(False, Kernels(products="mkl")), (True, FIXED)])
def test_a_run_computes_by_its_choice_and_a_deterministic_one_by_what_is_fixed(
    timed: list[list[str]], tmp_path: Path, deterministic: bool, kernels: Kernels
) -> None:
    run = tiny_run(LayoutSpec(), precision="fp32", deterministic=deterministic)
    data = run.run.data.model_copy(update={"cache_dir": str(tmp_path)})
    run = run.model_copy(update={"run": run.run.model_copy(update={"data": data})})
    with measured_kernels(run, RankContext(device=torch.device("cpu"))):
        assert CHOSEN.get() == kernels
    assert CHOSEN.get() == FIXED
    assert (tmp_path / FILE).exists() is not deterministic


def chosen_by_each(folder: str) -> Kernels:
    """What this rank computes by, where only the first measures."""
    run = tiny_run(LayoutSpec(dp_shard=2), precision="fp32")
    data = run.run.data.model_copy(update={"cache_dir": folder})
    run = run.model_copy(update={"run": run.run.model_copy(update={"data": data})})
    with measured_kernels(run, RankContext(device=torch.device("cpu"))):
        return CHOSEN.get()


def test_ranks_compute_by_the_same_kernels(ranks, tmp_path: Path) -> None:
    one, other = ranks.run(2, chosen_by_each, str(tmp_path))
    assert one == other
    assert len(json.loads((tmp_path / FILE).read_text())) == 1


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_kernels_differ_in_rounding_alone(precision: str, tolerance: float) -> None:
    losses = []
    for kernels in (Kernels(), Kernels(products="mkl", attention="torch")):
        with using(kernels):
            trainer = build_here(tiny_run(LayoutSpec(), family="gpt2", precision=precision))
            with loader_for(trainer) as loader:
                losses.append([trainer.train_step(step, loader.microbatches(step - 1)).loss for step in (1, 2, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_the_shapes_are_those_of_a_rank() -> None:
    run = tiny_run(LayoutSpec(tp=2), precision="fp32")
    shapes = shapes_of(run)
    assert (shapes.into, shapes.out) == (run.model.hidden, run.model.ffn // 2)
    assert (shapes.heads, shapes.shared) == (2 * run.micro_batch, run.micro_batch)
