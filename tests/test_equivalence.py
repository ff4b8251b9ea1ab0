"""Every layout against one process: loss, every gradient, every weight after one step, in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import Outcome, largest_difference, one_step
from meshwright.testing.layouts import LAYOUTS, MODEL_PARALLEL, REFUSED, refusal
from meshwright.testing.ranks import RankPool
from tiny import EPS, GLOBAL_BATCH, LR, SEQUENCE_LENGTH, STRATEGIES, tiny_run

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
FAMILIES += ("gemma3", "olmo3", "smollm3", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5", "qwen3_5_moe")
PARALLEL = [name for name in STRATEGIES if name != "single"]
RECOMPUTES = ("none", "selective", "full")
_ALONE: dict[str, Outcome] = {}


def alone(*, documents: bool = False, **options: Any) -> Outcome:
    """The outcome of one process with the whole batch at once, computed once per model and kind of rows."""
    run = tiny_run(LayoutSpec(), **options)
    key = f"{documents} {run.model_dump_json()}"
    if key not in _ALONE:
        outcome = one_step(run, documents)
        assert outcome is not None
        _ALONE[key] = outcome
    return _ALONE[key]


def assert_equal(
    ours: Outcome, expected: Outcome, *, dtype: torch.dtype = torch.float64, slope: float = LR / EPS
) -> None:
    """Equal up to the order of summation.

    A sum of n terms in another order differs by at most about n eps times the sum of the terms' sizes. The longest sums
    run over the batch's tokens, and their terms have the size of the largest gradient. A weight after the step differs
    by at most the gradient's difference times `slope`, the optimizer step's derivative, plus its own rounding.
    """
    unit = torch.finfo(dtype).eps
    tolerance = GLOBAL_BATCH * SEQUENCE_LENGTH * unit
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    assert abs(ours.loss - expected.loss) <= tolerance * expected.loss
    assert abs(ours.gnorm - expected.gnorm) <= tolerance * expected.gnorm
    difference, name = largest_difference(ours.gradients, expected.gradients)
    assert difference <= tolerance * largest, name
    difference, name = largest_difference(ours.weights, expected.weights)
    assert difference <= tolerance * largest * slope + 4 * unit, name


def check(
    ranks: RankPool,
    strategy: str,
    *,
    accumulation: int = 1,
    recompute: str | dict[str, int] = "none",
    documents: bool = False,
    **options: Any,
) -> None:
    """One layout's outcome against one process that neither accumulates nor recomputes."""
    layout = LAYOUTS[strategy]
    if GLOBAL_BATCH // layout.data_parallel % accumulation:
        accumulation = 2  # three ranks have four sequences each
    run = tiny_run(layout, accumulation=accumulation, recompute=recompute, **options)
    outcome = ranks.run(layout.world_size, one_step, run, documents)[0]
    assert_equal(outcome, alone(documents=documents, **options))


@pytest.mark.every(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_every_pair_for_llama(ranks: RankPool, strategy: str, recompute: str) -> None:
    """Every strategy is tested with every recomputation, and each pair with tied and untied embeddings and both
    accumulations."""
    turn = list(STRATEGIES).index(strategy) + RECOMPUTES.index(recompute)
    check(ranks, strategy, recompute=recompute, tied=turn % 2 == 0, accumulation=(1, 3)[turn // 2 % 2])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        (family, strategy)
        for number, family in enumerate(family for family in FAMILIES if family != "llama")
        for strategy in list(STRATEGIES)[number % 2 :: 2]
    ],
)
def test_strategies_for_every_family(ranks: RankPool, family: str, strategy: str) -> None:
    """Each family is tested with every second strategy. Recomputation, ties and accumulation alternate, so that every
    family and every strategy is tested with each mode of each; llama, above, has all combinations."""
    turn = FAMILIES.index(family) + list(STRATEGIES).index(strategy)
    accumulation, recompute = (1, 3)[turn // 2 % 2], ("none", "selective", {"full": 1})[turn % 3]
    check(ranks, strategy, family=family, recompute=recompute, tied=turn % 2 == 0, accumulation=accumulation)


def layouts_that_split_the_model() -> Iterator[Any]:
    """(layout, family, its place in an order of all), each layout with several families.

    More ranks cost more: two ranks are tested with every third family, four with every sixth, more with every eighth;
    each layout begins with another family, the one of `make test`.
    """
    for turn, name in enumerate(MODEL_PARALLEL):
        layout = LAYOUTS[name]
        every = {2: 3, 4: 6, 6: 8, 8: 8}[layout.world_size]
        families = [f for f in FAMILIES if not find_misfits(layout, tiny_run(layout, family=f).model, SEQUENCE_LENGTH)]
        for more, family in enumerate(families[turn % every :: every]):
            marks = [pytest.mark.exhaustive] if more else []
            yield pytest.param(name, family, turn + more, marks=marks, id=f"{name}-{family}")


@pytest.mark.parametrize(("name", "family", "turn"), list(layouts_that_split_the_model()))
def test_every_layout_that_splits_the_model(ranks: RankPool, name: str, family: str, turn: int) -> None:
    """Tied and untied, packed documents, recomputation and accumulation alternate over layouts and families."""
    check(
        ranks,
        name,
        family=family,
        tied=turn % 2 == 0,
        documents=turn % 5 < 2,
        recompute=RECOMPUTES[turn % 3],
        accumulation=3 if turn % 4 < 2 else 1,
    )


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*PARALLEL, "tp-wide", "zero-3-tp-uneven", "zero-3-tp-wide"])
def test_muon(ranks: RankPool, strategy: str) -> None:
    """Orthogonalisation divides by a matrix's norm and then enlarges differences by at most 3.4445^5 = 485."""
    options = {"optimizer": {"name": "muon", "lr": LR, "eps": EPS, "muon_lr": 0.02}}
    expected = alone(**options)
    smallest = min(gradient.norm().item() for gradient in expected.gradients.values() if gradient.dim() == 2)
    layout = LAYOUTS[strategy]
    outcome = ranks.run(layout.world_size, one_step, tiny_run(layout, **options))[0]
    assert_equal(outcome, expected, slope=0.02 * 485 / smallest)


@pytest.mark.every(3)
@pytest.mark.parametrize("strategy", [*PARALLEL, "tp-wide", "hybrid-3-tp"])
def test_fp32(ranks: RankPool, strategy: str) -> None:
    layout = LAYOUTS[strategy]
    outcome = ranks.run(layout.world_size, one_step, tiny_run(layout, precision="fp32"))[0]
    assert_equal(outcome, alone(precision="fp32"), dtype=torch.float32)


@pytest.mark.every(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", PARALLEL)
def test_low_precision_rounds_as_one_process_does(ranks: RankPool, strategy: str, precision: str) -> None:
    """Each microbatch's gradient is rounded once, at the same place in every layout.

    With one sequence per microbatch the low-precision work has the same numbers everywhere, and only fp32 sums over
    microbatches and ranks differ in order: equality to fp32's tolerance, not to bf16's.
    """
    layout = STRATEGIES[strategy]
    per_rank = GLOBAL_BATCH // layout.data_parallel
    run = tiny_run(layout, precision=precision, accumulation=per_rank)
    outcome = ranks.run(layout.world_size, one_step, run)[0]
    assert_equal(outcome, alone(precision=precision, accumulation=GLOBAL_BATCH), dtype=torch.float32)
    assert all(tensor.dtype == torch.float32 for tensor in outcome.weights.values())


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_of_a_split_model_rounds_no_worse_than_one_process(ranks: RankPool, precision: str) -> None:
    """Each rank's part of a row-wise product is rounded before the parts are added, so the numbers differ from one
    process's, but by at most twice as much from the exact ones."""
    exact = alone(family="gpt2")
    rounded = one_step(tiny_run(LayoutSpec(), family="gpt2", precision=precision))
    layout = LAYOUTS["zero-3-tp-wide"]
    split = ranks.run(layout.world_size, one_step, tiny_run(layout, family="gpt2", precision=precision))[0]
    assert rounded is not None
    errors = [
        sum((outcome.gradients[name] - exact.gradients[name]).square().sum() for name in exact.gradients)
        for outcome in (split, rounded)
    ]
    assert 0 < errors[0] <= 2**2 * errors[1]
    assert all(tensor.dtype == torch.float32 for tensor in split.weights.values())


@pytest.mark.parametrize("layout", REFUSED, ids=str)
def test_what_does_not_fit_is_refused(layout: dict[str, Any]) -> None:
    assert "nearest legal layout" in refusal(layout, tiny_run(LayoutSpec()).model, SEQUENCE_LENGTH)


def test_clipping_scales_the_step_by_the_global_norm(ranks: RankPool) -> None:
    check(ranks, "hybrid-3", clip=0.05)
    clipped, free = alone(clip=0.05), alone(clip=None)
    assert clipped.gnorm == free.gnorm > 0.05
    assert largest_difference(clipped.weights, free.weights)[0] > 0
