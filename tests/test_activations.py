"""Every activation function, gated and not, computes the same wherever it is written down."""

import json
import math
import shutil
from itertools import product
from typing import get_args

import pytest
import torch

from meshwright.families import parameter_table
from meshwright.models import build_model, initialize
from meshwright.models.compiled import ACTIVATIONS, COMPILERS, compile_step
from meshwright.models.feed_forward import FeedForward
from meshwright.models.moe import Rows
from meshwright.models.packed import pack
from meshwright.predict.blueprint import blueprint
from meshwright.serve.readers import CachedReader
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ActivationName, ModelSpec
from meshwright.spec.recipe import renew
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import largest_difference, one_step
from served import spec_of
from tiny import tiny_run

EXACT = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
ELEMENTWISE = tuple(name for name in get_args(ActivationName) if name != "clamped_silu")
"""clamped_silu takes both projections; tests/test_native_families.py compares it with transformers' gpt_oss."""
KINDS = list(product(ELEMENTWISE, (True, False)))


def changed(spec: ModelSpec, kind: tuple[str, bool]) -> ModelSpec:
    return spec.model_copy(update={"activation": kind[0], "gated": kind[1]})


def test_every_activation_has_its_formula_here_and_a_number_in_the_compiled_step() -> None:
    assert EXACT.keys() == ACTIVATIONS.keys() == set(ELEMENTWISE)
    assert sorted(ACTIVATIONS.values()) == list(range(len(ACTIVATIONS)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_layer_is_its_formula(kind: tuple[str, bool]) -> None:
    layer = FeedForward(changed(spec_of("llama"), kind), 20).double()
    x_ND = torch.randn(7, layer.w1.weight.shape[1], dtype=torch.float64)
    h_NF = (x_ND @ layer.w1.weight.T).detach().apply_(EXACT[kind[0]])
    if layer.w3 is not None:
        h_NF = h_NF * (x_ND @ layer.w3.weight.T)
    assert (layer.w3 is not None) == kind[1]
    torch.testing.assert_close(layer(x_ND), h_NF @ layer.w2.weight.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_table_module_and_plan_agree(kind: tuple[str, bool]) -> None:
    spec = changed(spec_of("llama"), kind)
    rows = {row.name: row.shape for row in parameter_table(spec)}
    assert rows == {name: tuple(p.shape) for name, p in build_model(spec).named_parameters()}
    assert blueprint(spec).num_parameters == sum(math.prod(shape) for shape in rows.values())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_generation_s_kernels_compute_the_same(
    kind: tuple[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed modules and, where there is a compiler, the compiled step."""
    monkeypatch.setattr("meshwright.models.packed.SMALL", 0)
    spec = changed(spec_of("llama"), kind)
    plain, packed, compiled = (build_model(spec, device="cpu", dtype=dtype).eval() for _ in range(3))
    for model in (plain, packed, compiled):
        initialize(model, parameter_table(spec), seed=1)
    pack(packed)
    if any(map(shutil.which, COMPILERS)):
        compile_step(compiled, lambda _: None)
    readers = [CachedReader(model) for model in (plain, packed, compiled)]
    for tokens in ([(0, [5, 6, 7]), (1, [3])], [(0, [9]), (1, [4])]):
        expected, *others = (reader.read(tokens, 2).double() for reader in readers)
        for other in others:
            assert (other - expected).norm() <= 20 * torch.finfo(dtype).eps * expected.norm()


def run_of(kind: tuple[str, bool], layout: LayoutSpec, family: str) -> ResolvedRun:
    run = tiny_run(layout, family=family)
    return run.model_copy(update={"model": changed(run.model, kind)})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_split_layer_equals_one_process(ranks, kind: tuple[str, bool]) -> None:
    alone = one_step(run_of(kind, LayoutSpec(), "llama"))
    split = ranks.run(2, one_step, run_of(kind, LayoutSpec(tp=2), "llama"))[0]
    assert alone is not None
    assert largest_difference(split.gradients, alone.gradients)[0] < 1e-12


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_experts_have_it_too(name: str) -> None:
    """With one expert for every token, experts are a gated feed-forward layer."""
    spec = changed(tiny_run(LayoutSpec(), family="mixtral").model, (name, True))
    experts = build_model(spec, device="cpu", dtype=torch.float64).layers["0"].feed_forward.experts
    for matrix in experts.matrices:
        torch.nn.init.normal_(matrix.weight, std=0.3)
    x_MD = torch.randn(6, spec.hidden, dtype=torch.float64)
    counts_E = torch.zeros(spec.num_experts, dtype=torch.int64)
    counts_E[1] = len(x_MD)
    w1, w2, w3 = (matrix.weight[1].detach() for matrix in experts.matrices)
    expected = ((x_MD @ w1.T).apply_(EXACT[name]) * (x_MD @ w3.T)) @ w2.T
    torch.testing.assert_close(experts(x_MD, Rows(counts_E[:, None], None)), expected, rtol=1e-12, atol=1e-12)


def test_a_model_of_an_older_version_keeps_its_meaning() -> None:
    for old, kind in (("swiglu", ("silu", True)), ("gelu_tanh", ("gelu_tanh", False))):
        saved = spec_of("llama").model_dump(mode="json")
        del saved["gated"]
        run = {"model": {**saved, "activation": old}}
        renew(run)
        spec = ModelSpec.model_validate_json(json.dumps(run["model"]), strict=True)
        assert (spec.activation, spec.gated) == kind
