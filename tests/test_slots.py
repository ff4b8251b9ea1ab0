"""Slots: every stack of ops on a linear layer equals its formula, nothing is overridden in the models that layouts
build, and built models show the contents of their slots."""

import functools
import inspect
import itertools
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from meshwright.models.adapters import Lora, Scaled
from meshwright.models.blockwise import as_bits, encode_int8, encode_nf4
from meshwright.models.linear import Linear, Product, is_linear
from meshwright.models.quantized import Quantized
from meshwright.models.slots import Weights
from meshwright.parallel.weight_gradients import WeightGradients, add_weight_gradients
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, build_here, one_step
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from test_equivalence import alone, assert_equal
from test_qlora import METHODS, WIDE
from tiny import NEEDS_SHARDED_INTEGERS, tiny_run

D, N, R = 64, 5, 3


def rounded(x: torch.Tensor) -> torch.Tensor:
    return (x * 8).round() / 8


class Rounded(Product):
    """A stand-in for a low-precision product: input, weight and gradient are rounded where they are used."""

    def compute(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return F.linear(rounded(x), rounded(weights["weight"]), weights["bias"])

    def input_gradient(self, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        return rounded(grad) @ rounded(weights["weight"])

    def weight_gradient(self, x: torch.Tensor, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        return rounded(grad).flatten(0, -2).T @ rounded(x).flatten(0, -2)


def layer_of(product: str, adapter: str) -> Linear:
    """A layer [N, D] in float64 with drawn parameters; a quantized weight is frozen, all else trains."""
    torch.manual_seed(0)
    layer = Linear(D, N).double()
    if product in ("nf4", "int8"):
        codes, scales = encode_nf4(layer.weight.float()) if product == "nf4" else encode_int8(layer.weight.float())
        kept = {"codes": codes.view(N, -1), "scales": as_bits(scales).view(N, -1) if product == "nf4" else None}
        kept["scales"] = as_bits(scales) if kept["scales"] is None else kept["scales"]
        del layer.weight
        for name, tensor in kept.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        layer.put(Quantized(product, (N, D)))
    elif product == "rounded":
        layer.put(Rounded())
    shapes = {"ia3-inputs": {"factors": (D,)}, "ia3-outputs": {"factors": (N,)}, "none": {}}
    low_rank = {"lora_a": (R, D), "lora_b": (N, R)}
    for name, shape in shapes.get(adapter, low_rank | ({"magnitude": (N,)} if adapter == "dora" else {})).items():
        layer.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64) / 4))
    if adapter.startswith("ia3"):
        layer.put(Scaled(scales_input=adapter == "ia3-inputs"))
    elif adapter != "none":
        layer.put(Lora(0.5))
    return layer


def formula(layer: Linear, product: str, adapter: str, x: torch.Tensor) -> torch.Tensor:
    """The layer's output, by autograd alone."""
    weights = dict(layer.named_parameters())
    weight = layer.product.merged(layer.view.read(layer))["weight"].double()
    factors = weights.get("factors")
    x = x * factors if adapter == "ia3-inputs" else x
    if product == "rounded":
        straight = [tensor + (rounded(tensor) - tensor).detach() for tensor in (x, weight)]
        y = F.linear(*straight)
        y.register_hook(rounded)
    else:
        y = x @ weight.T
    bias = weights["bias"]
    if adapter in ("lora", "dora"):
        added = 0.5 * x @ weights["lora_a"].T @ weights["lora_b"].T
        if adapter == "dora":
            whole = weight + 0.5 * weights["lora_b"] @ weights["lora_a"]
            scale = weights["magnitude"] / whole.norm(dim=1).detach()
            return y + bias + (scale - 1) * y + scale * added
        return y + bias + added
    return (y + bias) * factors if adapter == "ia3-outputs" else y + bias


ADAPTERS = ("none", "lora", "dora", "ia3-inputs", "ia3-outputs")
WAYS = ("plainly", "deferred", "recomputed", "deferred and recomputed", "compiled")
STACKS = [
    (product, adapter, way)
    for product, adapter, way in itertools.product(("plain", "rounded", "nf4", "int8"), ADAPTERS, WAYS)
    if "deferred" not in way or product in ("plain", "rounded")  # else there is no gradient to defer
    if way != "compiled" or product == "plain" or adapter in ("none", "dora")  # each product, each adapter, and DoRA,
]  # which reads the product's weight


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler asks for it
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(("product", "adapter", "way"), STACKS)
def test_every_stack_is_its_formula(product: str, adapter: str, way: str) -> None:
    """Output, and the gradients of the input and of every parameter; deferred gradients appear when they are added, not
    before."""
    layer = layer_of(product, adapter)
    x = torch.randn(2, 4, D, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 4, N, dtype=torch.float64)
    trained = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    expected_y = formula(layer, product, adapter, x)
    expected = torch.autograd.grad(expected_y, [x, *trained.values()], dy)
    weights = WeightGradients(layer) if "deferred" in way else None
    run: Any = functools.partial(checkpoint, layer, use_reentrant=False) if "recomputed" in way else layer
    if way == "compiled":
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = run(x)
    y.backward(dy)
    if weights is not None:
        assert layer.weight.grad is None
        assert layer.bias.grad is None or adapter == "dora"  # which also reads the bias
        add_weight_gradients(weights.take())
        assert not weights.take()
    # Codes decode to fp32, whose products are those of fp64 numbers; sums of D terms.
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    for name, ours, gradient in zip(["x", *trained], [x, *trained.values()], expected, strict=True):
        torch.testing.assert_close(ours.grad, gradient, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_place_has_one_op_whatever_order_it_is_filled_in() -> None:
    first, second = layer_of("plain", "lora"), layer_of("plain", "none")
    WeightGradients(first)
    first.put(Rounded())
    WeightGradients(second)
    second.put(Rounded())
    second.put(Scaled(scales_input=True))
    second.put(Lora(0.5))
    assert [type(op) for op in first.ops] == [type(op) for op in second.ops]
    assert [op.inner for op in first.ops[1:]] == list(first.ops[:-1])
    assert "weight gradient deferred < LoRA of scale 0.5" in repr(first)


def test_classes_of_transformers_that_are_linear_layers_are_told_from_those_that_are_not() -> None:
    class Same(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.T + self.bias

    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    assert [is_linear(cls(3, 2)) for cls in (nn.Linear, Same, Other)] == [True, True, False]
    assert not is_linear(nn.Identity())


def compiled_step(run: ResolvedRun) -> Outcome | None:
    """A first step, compiled parts without code generation, which would be slow. Collective."""
    torch._dynamo.reset()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")):
        return one_step(run)


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tp": 2}, {"recompute": "selective"}),
        ({"dp_shard": 2}, {}),
        ({"dp_replicate": 2}, {}),
        ({"dp_shard": 2, "ep": 2}, {"family": "mixtral"}),
    ],
)
def test_a_model_compiled_as_one_equals_one_process(
    ranks: RankPool, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    run = tiny_run(LayoutSpec.model_validate(fields), compile=True, compile_scope="model", accumulation=2, **options)
    outcome = ranks.run(2, compiled_step, run, timeout=120)[0]
    assert_equal(outcome, alone(**{key: value for key, value in options.items() if key == "family"}), slope=5 * 0.1)


ZERO_BUBBLE = {"pp": 2, "schedule": "interleaved-zero-bubble", "stages_per_rank": 1}
COMPOSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero-bubble zero-3 lora recompute": (
        ZERO_BUBBLE | {"dp_shard": 2},
        {"finetune": {"method": "lora", "rank": 4, "targets": ["wq", "w2"], "train": ["w1"]}, "recompute": "full"},
    ),
    "zero-bubble zero-3 tp nf4 recompute": (
        ZERO_BUBBLE | {"dp_shard": 2, "tp": 2},
        {"finetune": METHODS["nf4"], "width": WIDE, "recompute": "selective"},
    ),
    "zero-bubble tp biases": (ZERO_BUBBLE | {"tp": 2}, {"family": "gpt2", "recompute": "selective"}),
    "tp zero-3 dora int8 compile recompute": (
        {"tp": 2, "dp_shard": 2},
        {"finetune": METHODS["int8-dora"], "width": WIDE, "compile": True, "recompute": "selective", "num_layers": 1},
    ),
    "tp ia3 biases compile": ({"tp": 2}, {"family": "gpt2", "finetune": {"method": "ia3"}, "compile": True}),
}
"""Pairs of strategies that share a linear layer and are in no list of layouts; a zero-bubble schedule cannot be
compiled (`tests/test_pipeline.py`), and torch cannot compile full recomputation of split layers (LOG.md)."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Markers of a composition; compiled ones are exhaustive, because they take as long as all others together."""
    marks = [NEEDS_SHARDED_INTEGERS] if "nf4" in name or "int8" in name else []
    return [*marks, pytest.mark.exhaustive] if "compile" in name else marks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in COMPOSED])
def test_strategies_compose(ranks: RankPool, name: str) -> None:
    fields, options = COMPOSED[name]
    layout = LayoutSpec.model_validate(fields)
    step = compiled_step if options.get("compile") else one_step
    outcome = ranks.run(layout.world_size, step, tiny_run(layout, **options), timeout=120)[0]
    plain = {key: value for key, value in options.items() if key not in ("compile", "recompute")}
    assert_equal(outcome, alone(**plain), slope=5 * 0.1)


def overridden(run: ResolvedRun) -> list[str]:
    """Modules of this rank's model with a method of their own, or with a class that no file defines. Collective."""
    found = []
    for path, module in build_here(run).model.named_modules():
        cls = type(module)
        if isinstance(module, FSDPModule):  # torch derives its class from ours
            cls = next(base for base in cls.__mro__[1:] if base is not FSDPModule)
        if getattr(sys.modules[cls.__module__], cls.__qualname__, None) is not cls:
            found.append(f"{path}: class {cls.__qualname__}")
        own = (name for name in vars(module) if inspect.isroutine(inspect.getattr_static(cls, name, None)))
        found += [f"{path}.{name}" for name in own]
    return found


BUILT: dict[str, tuple[LayoutSpec, dict[str, Any]]] = {
    "everything alone": (LayoutSpec(), {"compile": True, "recompute": "selective", "finetune": METHODS["nf4-double"]}),
    "zero-bubble tp": (LAYOUTS["pp-zero-bubble-tp"], {"family": "gpt2", "recompute": "full"}),
    "ring of experts": (EXPERT_PARALLEL["cp-tp-ep"], {"family": "mixtral", "compile": True, "cp_method": "ring"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_nothing_that_was_built_is_overridden(ranks: RankPool, name: str) -> None:
    layout, options = BUILT[name]
    if "cp_method" in options:
        options = dict(options)
        layout = layout.model_copy(update={"cp_method": options.pop("cp_method")})
    for found in ranks.run(layout.world_size, overridden, tiny_run(layout, **options)):
        assert not found
