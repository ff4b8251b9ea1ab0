"""Attention kernels by name: the named kernel computes, with the same numbers as any other."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.models import Decoder, attention
from meshwright.models.attention import Core
from meshwright.models.attention_kernels import AttentionNeeds, NamedCore, check_kernel, describe_kernel
from meshwright.models.masks import Documents, attention_mask
from meshwright.parallel.compile import apply_compile
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.training import AttentionName, TrainingSpec
from meshwright.testing.equivalence import build_here, one_step
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.setup import RankContext, build_trainer
from test_equivalence import assert_equal
from test_models_documents import reference_varlen
from tiny import tiny_run

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [3, 4, 4, 4, 4, 4, 4, 4]])
MASKS = {
    "causal": None,
    "window": attention_mask(8, 8, window=3, device=CPU),
    "documents": Documents(DOCUMENTS, window=None),
    "documents and window": Documents(DOCUMENTS, window=3),
}


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads() -> Heads:
    """Queries, keys and values; two query heads share one of the others."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    q, k, v = (torch.randn(2, number, 8, 4, **options) for number in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "operation"), [("flash", "FlashAttentionForCpu"), ("math", "UnsafeView")])
def test_the_named_kernel_computes(name: AttentionName, operation: str, mask: str) -> None:
    ours, theirs = heads(), heads()
    y, expected = NamedCore(name)(*ours, MASKS[mask]), Core()(*theirs, MASKS[mask])
    assert operation in str(y.grad_fn)
    assert torch.allclose(y, expected, atol=1e-12)
    (y * torch.arange(4)).sum().backward()
    (expected * torch.arange(4)).sum().backward()
    assert all(
        torch.allclose(a.grad, b.grad, atol=1e-12) for a, b in zip(ours, theirs, strict=True) if a.grad is not None
    )
    assert ours[0].grad is not None


@pytest.mark.parametrize("mask", ["causal", "window", "documents and window"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.slow
def test_flex(mask: str) -> None:
    """Its forward pass; a CPU has no other."""
    with torch.no_grad():
        q, k, v = (x.float() for x in heads())
        expected = Core()(q, k, v, MASKS[mask])
        assert torch.allclose(NamedCore("flex")(q, k, v, MASKS[mask]), expected, atol=1e-5)


@pytest.mark.parametrize(("mask", "window"), [("causal", None), ("window", 3), ("documents and window", 3)])
def test_varlen_takes_rows_without_documents_too(
    mask: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "VARLEN", {"window_size", "enable_gqa"})
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)
    found = NamedCore("varlen", window)(*heads(), MASKS[mask])
    assert torch.allclose(found, Core()(*heads(), MASKS[mask]), atol=1e-12)


def asked(**changes: Any) -> AttentionNeeds:
    return AttentionNeeds(CPU, torch.bfloat16, 64, documents=False, window=None)._replace(**changes)


@pytest.mark.parametrize("name", ["mem_efficient", "cudnn", "flex", "varlen"])
def test_a_kernel_that_the_device_lacks_is_refused(name: AttentionName) -> None:
    with pytest.raises(UserError, match=r"\(cpu, bfloat16, heads of 64, documents .*\); use flash or math or auto"):
        check_kernel(name, asked(documents=True))
    with pytest.raises(UserError, match=f"training.attention={name}"):
        build_trainer(tiny_run(LayoutSpec(), attention=name), RankContext())


def test_what_is_told() -> None:
    check_kernel("math", asked(window=5))
    assert describe_kernel("auto", asked(documents=True)) == "flash, chosen by auto"
    assert describe_kernel("math", asked()) == "math"
    model = build_here(tiny_run(LayoutSpec(), attention="math")).model
    assert str(model).count("core: math") == 2


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_layouts_with_a_named_kernel_equal_one_process(ranks: RankPool, family: str) -> None:
    layout = LayoutSpec(cp=2, cp_method="ulysses")
    found = ranks.run(2, one_step, tiny_run(layout, attention="math", family=family), True)[0]
    expected = one_step(tiny_run(LayoutSpec(), family=family), True)
    assert expected is not None
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("training", "layout", "problem"),
    [
        ({"attention": "math"}, {"cp": 2, "cp_method": "ring"}, "use layout.cp_method=ulysses, or training.attention="),
        ({"compile_mode": "max-autotune-no-cudagraphs"}, {}, "only applies to compilation; set compile=true"),
        ({"compile": True, "compile_scope": "model"}, {"pp": 2}, "with layout.pp=2: .*; use compile_scope=block"),
        (
            {"compile": True, "compile_scope": "model"},
            {"offload": {"optimizer": "disk", "parameters": "disk"}},
            "weights are read between blocks; use compile_scope=block",
        ),
        (
            {"compile": True, "compile_scope": "model"},
            {"offload": {"activations": "host"}},
            "activations move between blocks; use compile_scope=block",
        ),
        ({"compile_scope": "model"}, {}, "compile_scope=model only applies to compilation; set compile=true"),
    ],
)
def test_what_makes_no_sense_is_refused(training: dict[str, Any], layout: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_run(tiny_run(LayoutSpec.model_validate(layout), **training).run, base_dir=Path())


def test_blocks_are_compiled_in_the_recipes_mode() -> None:
    mode = TrainingSpec(compile=True, compile_mode="max-autotune-no-cudagraphs").compile_mode
    model = build_here(tiny_run(LayoutSpec())).model
    assert isinstance(model, Decoder)
    asked_of: list[dict[str, Any]] = []

    def compiled(compute: Any, **options: Any) -> Any:
        asked_of.append(options)
        return compute

    with mock.patch("torch.compile", compiled):
        apply_compile(model, mode)
    assert asked_of == 2 * [{"dynamic": False, "mode": mode}]
    assert "compiled (max-autotune-no-cudagraphs)" in str(model)
    whole = build_here(tiny_run(LayoutSpec())).model
    assert isinstance(whole, Decoder)
    with mock.patch("torch.compile", compiled):
        apply_compile(whole, mode, "model")
    assert asked_of == 3 * [{"dynamic": False, "mode": mode}]
    assert str(whole).count("compiled (as one, max-autotune-no-cudagraphs)") == 1
