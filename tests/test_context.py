"""Context parallelism: attention over ranks against attention on one device, and whole layouts against one process."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright.models.attention import Attention
from meshwright.models.head import HeadSplit
from meshwright.models.masks import Documents
from meshwright.models.partial_attention import Queries, add_part_, attend_part, attend_part_backward
from meshwright.parallel.context import apply_context_parallel, sequence_places
from meshwright.spec.fit import context_method, find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import one_step
from meshwright.testing.layouts import CONTEXT_PARALLEL
from meshwright.testing.ranks import RankPool
from test_equivalence import alone, assert_equal
from tiny import tiny_run

METHODS = ("ring", "all_gather", "ulysses")
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3", "olmo3", "smollm3")
FAMILIES += ("gpt_oss", "qwen3_next", "qwen3_5")
LAYOUTS = {name.removesuffix("-every-method"): layout for name, layout in CONTEXT_PARALLEL.items()}
T, K = 32, 8


class Bare(Attention):
    """Attention without projections, in a model of nothing else."""

    def __init__(self, window: int | None) -> None:
        torch.nn.Module.__init__(self)
        self.window, self.head_split = window, HeadSplit()


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(kv_heads: int, window: int | None, packed: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """((q, k, v, dy), (y, dq, dk, dv)) of whole rows by SDPA under a mask, and the rows' documents."""
    q, k, v, dy = (draw(2, heads, T, K, seed=i) for i, heads in enumerate((4, kv_heads, kv_heads, 4)))
    documents = (draw(2, T, seed=9) > 1).cumsum(1) if packed else None
    places = torch.arange(T)
    sees = (places <= places[:, None]) & (places > places[:, None] - (window or T))
    mask = sees.expand(2, 1, T, T)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    return (q, k, v, dy, y.detach(), *torch.autograd.grad(y, leaves, dy)), documents


def worst_attention_error(method: str, kv_heads: int, window: int | None, packed: bool) -> float:
    """The largest difference of y, dq, dk and dv on this rank."""
    (*inputs, dy, y, dq, dk, dv), documents = reference(kv_heads, window, packed)
    module: Any = Bare(window)
    apply_context_parallel(module, init_device_mesh("cpu", (dist.get_world_size(),)), method)  # type: ignore[arg-type]
    mine = torch.from_numpy(
        sequence_places(method, degree=dist.get_world_size(), rank=dist.get_rank(), length=T)  # type: ignore[arg-type]
    )
    leaves = [x[:, :, mine].requires_grad_() for x in inputs]
    mask = None if documents is None else Documents(documents, window=window)
    ours = module.core(*leaves, mask)
    gradients = torch.autograd.grad(ours, leaves, dy[:, :, mine])
    pairs = zip((ours, *gradients), (y, dq, dk, dv), strict=True)
    return max((a - b[:, :, mine]).abs().max().item() for a, b in pairs)


def worst_attention_errors(cases: list[tuple[Any, ...]]) -> list[float]:
    return [worst_attention_error(*case) for case in cases]


@pytest.mark.parametrize("ranks_in_ring", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_over_ranks(ranks: RankPool, method: str, ranks_in_ring: int) -> None:
    """Multi-head, grouped and one shared key; windows inside a chunk, over some and over all; packed rows or not.

    Sums of at most T terms of unit size, twice.
    """
    cases = [(method, *rest) for rest in itertools.product((4, 2, 1), (None, 3, 10, T), (False, True))]
    for errors in ranks.run(ranks_in_ring, worst_attention_errors, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < 2 * T * torch.finfo(torch.float64).eps, case


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "all", "mask"])
def test_parts_by_plain_products_equal_those_by_kernels(monkeypatch: pytest.MonkeyPatch, mask: Any, dtype: Any) -> None:
    """Queries are taken in blocks too: one that sees no key of a part gets nothing from it."""
    q, k, v, dy = (draw(2, heads, T, K, seed=i).to(dtype) for i, heads in enumerate((4, 2, 2, 4)))
    if mask == "mask":
        mask = torch.ones(T, T, dtype=torch.bool).tril(-1)
    outcomes = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr("meshwright.models.partial_attention._flash_kernels", lambda *_: None)
            monkeypatch.setattr("meshwright.models.partial_attention.SCORES", 7 * T)
        y, logsumexp = attend_part(q, k, v, mask)
        if isinstance(mask, torch.Tensor):
            assert logsumexp[:, :, 0].isneginf().all()
            assert not y[:, :, 0].any()
        own_y, own_logsumexp = attend_part(q, k, v, "causal")
        add_part_(own_y, own_logsumexp, y, logsumexp)
        grads = attend_part_backward(Queries(dy, q, own_y.to(dtype), own_logsumexp), k, v, mask)
        assert all(x.dtype == torch.promote_types(dtype, torch.float32) for x in (own_y, own_logsumexp, *grads))
        outcomes.append((own_y, own_logsumexp, *grads))
    for kernel, product in zip(*outcomes, strict=True):
        assert (kernel - product).abs().max() < 2 * T * torch.finfo(dtype).eps


def run_of(method: str, name: str, **options: Any):
    return tiny_run(LAYOUTS[name].model_copy(update={"cp_method": method}), **options)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_layouts_against_one_process(ranks: RankPool, method: str, name: str) -> None:
    """Families, recomputation, accumulation and ties alternate, so that each meets each over methods and layouts."""
    turn = METHODS.index(method) + list(LAYOUTS).index(name)
    for number, family in list(enumerate(FAMILIES))[turn % 4 :: 4]:
        recompute = ("none", "selective", "full")[(turn + number) % 3]
        accumulation, tied = (1, 3)[(turn + number) // 3 % 2], bool((turn + number) % 2)
        run = run_of(method, name, family=family, tied=tied, recompute=recompute, accumulation=accumulation)
        outcome = ranks.run(run.run.layout.world_size, one_step, run)[0]
        assert_equal(outcome, alone(family=family, tied=tied))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@pytest.mark.parametrize("method", METHODS)
def test_packed_documents(ranks: RankPool, method: str, family: str) -> None:
    run = run_of(method, "zero-3-cp", family=family, accumulation=2)
    expected = alone(documents=True, family=family)
    assert abs(expected.loss - alone(family=family).loss) > 1e-3, "documents make a difference"
    assert_equal(ranks.run(4, one_step, run, True)[0], expected)


@pytest.mark.parametrize("method", METHODS)
def test_fp32(ranks: RankPool, method: str) -> None:
    outcome = ranks.run(4, one_step, run_of(method, "hybrid-3-cp", precision="fp32"))[0]
    assert_equal(outcome, alone(precision="fp32"), dtype=torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_as_near_to_float64_as_one_process(ranks: RankPool, method: str) -> None:
    exact, one = alone(), alone(precision="bf16")
    ours = ranks.run(4, one_step, run_of(method, "zero-3-cp", precision="bf16"))[0]

    def error(outcome: Any) -> float:
        return sum((outcome.gradients[n] - g).square().sum().item() for n, g in exact.gradients.items()) ** 0.5

    assert error(ours) < 1.2 * error(one)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_place_is_held_once_and_the_work_is_even(degree: int) -> None:
    for method in METHODS:
        parts = [sequence_places(method, degree=degree, rank=rank, length=16) for rank in range(degree)]
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(16))
        if method != "ulysses":
            assert len({int(places.sum()) for places in parts}) == 1


def test_auto_takes_what_fits_and_says_why() -> None:
    model = tiny_run(LayoutSpec()).model  # 4 heads, 2 key and value heads
    for cp, length, expected in ((2, 16, "ulysses"), (4, 16, "ring"), (4, 12, "ulysses")):
        method, reason = context_method(LayoutSpec(cp=cp), model, length)
        assert method == expected
        assert "divide" in reason
    assert context_method(LayoutSpec(cp=2, cp_method="ring"), model, 16) == ("ring", "given")


def test_the_nearest_layout_is_found_for_all_axes_together() -> None:
    """Each reason is separate; one axis' advice never breaks another's, nor a model without positions."""
    short = tiny_run(LayoutSpec()).model
    (problem,) = find_misfits(LayoutSpec(tp=2, cp=3), short, 16)
    assert problem.endswith("the nearest legal layout is cp=2")
    model = short.model_copy(update={"max_positions": 512})
    (problem,) = find_misfits(LayoutSpec(tp=2, cp=3), model, 256)  # a third of 256 tokens is not for tp to complain of
    assert problem.endswith("the nearest legal layout is cp=2, or use data.sequence_length=258")
    tensor, context = find_misfits(LayoutSpec(tp=3, cp=3, cp_method="ring"), model, 16)
    assert tensor.startswith("layout.tp=3: 4 query heads")
    assert context.startswith("layout.cp=3 with cp_method=ring")
    assert tensor.endswith("; the nearest legal layout is tp=2, cp=2")
    assert context.endswith("; the nearest legal layout is tp=2, cp=2")
    assert not find_misfits(LayoutSpec(tp=2, cp=2, cp_method="ring"), model, 16)
    (problem,) = find_misfits(LayoutSpec(cp=48_872_231, cp_method="ring"), model, 16)  # fast and without memory
    assert problem.endswith("the nearest legal layout is cp=8")
    (problem,) = find_misfits(LayoutSpec(cp=3, cp_method="ring", zero=3), model, 17)
    assert problem.endswith("the nearest legal layout is cp=1, zero=0, or use data.sequence_length=18")


@pytest.mark.parametrize(
    ("layout", "length", "words"),
    [
        (LayoutSpec(cp=3, cp_method="ring"), 16, ("sequence_length=16", "cp=2", "sequence_length=18")),
        (LayoutSpec(cp=4, cp_method="all_gather"), 20, ("8 equal chunks", "cp=2", "sequence_length=16")),
        (LayoutSpec(cp=8, cp_method="ulysses"), 16, ("4 heads", "cp=8, cp_method=ring", "cp=4")),
        (LayoutSpec(cp=4, cp_method="ulysses"), 18, ("4 equal parts", "cp=2", "sequence_length=16")),
    ],
)
def test_what_does_not_divide_is_refused(layout: LayoutSpec, length: int, words: tuple[str, ...]) -> None:
    model = tiny_run(LayoutSpec()).model.model_copy(update={"max_positions": 32})
    (problem,) = find_misfits(layout, model, length)
    assert all(word in problem for word in words), problem
    assert not find_misfits(LayoutSpec(cp=2), model, 16)
