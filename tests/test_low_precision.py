"""Low precision on one process: scales and codes by the published formulas, written out here independently; products
equal to torchao's bit for bit, if it is installed; the recipe's settings."""

import dataclasses
from math import floor, log2
from typing import Any

import pytest
import torch

from meshwright import torch_internals
from meshwright.families import low_precision_layers, low_precision_misfits, parameter_table
from meshwright.models import low_precision
from meshwright.models.cpu_kernels import linear
from meshwright.models.dropout import Draws
from meshwright.models.grouped_low_precision import GroupedLowPrecision
from meshwright.models.linear import Linear
from meshwright.models.low_precision import (
    RECIPES,
    AmaxHistory,
    LastEncoded,
    LowPrecision,
    Past,
    has_kernel,
)
from meshwright.models.moe import ExpertLinear, Rows
from meshwright.models.scaling import AT_ONCE, E2M1, E4M3, E5M2, Scaling, encode, hadamard, round_e2m1
from meshwright.models.slots import unreduced
from meshwright.parallel.recompute import KEPT, PRODUCTS
from meshwright.parallel.weight_gradients import WeightGradients, add_weight_gradients
from meshwright.predict.activations import block_activations
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import engine_job
from meshwright.rehearse.fake import fill_slots
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.low_precision import KERNELS
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import TrainingSpec
from meshwright.testing.equivalence import build_here, loader_for
from test_low_precision_layouts import narrow_run, run_of_experts

HERE = unreduced, unreduced
M, D, N = 64, 96, 160
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers of many sizes, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x.view(-1, shape[-1])[3] = 0
    return x.to(dtype)


def blocks_of(x: torch.Tensor, rows: int, columns: int) -> list[tuple[slice, slice]]:
    return [
        (slice(i, i + rows), slice(j, j + columns))
        for i in range(0, x.shape[0], rows)
        for j in range(0, x.shape[1], columns)
    ]


@pytest.mark.parametrize("number", [E4M3, E5M2])
@pytest.mark.parametrize(("rows", "columns"), [(None, None), (1, None), (1, 128), (128, 128)])
def test_a_block_is_scaled_so_that_its_largest_number_fits(number: Any, rows: int | None, columns: int | None) -> None:
    """s = largest / amax; the last blocks are smaller if the sizes do not divide."""
    x = matrix(200, 150).float()
    ours = encode(x, Scaling(number, rows, columns), HERE).decode()
    for part in blocks_of(x, rows or 200, columns or 150):
        scale = torch.tensor(number.largest / max(x[part].abs().max().item(), 1e-12))
        expected = (x[part] * scale).clamp(-number.largest, number.largest).to(number.dtype).float() / scale
        assert torch.equal(ours[part], expected)


def test_rows_are_scaled_by_powers_of_two_that_are_not_too_large() -> None:
    x = matrix(M, D).float()
    encoded = encode(x, Scaling(E4M3, 1, None, "power_of_two"), HERE)
    for row, scale in zip(x, encoded.scales.flatten(), strict=True):
        expected = 2.0 ** floor(log2(448 / max(row.abs().max().item(), 1e-12)))
        assert scale == expected


def test_mx_blocks_have_the_exponent_of_the_standard() -> None:
    """OCP MX 1.0, section 6.3: X = 2^(floor(log2 amax) - emax); numbers above the largest saturate."""
    x = matrix(M, D).float()
    x[5, :32] = 0.999 * 2.0**-3 * 2  # between 448 and 512 times the scale
    ours = encode(x, Scaling(E4M3, 1, 32, "e8m0"), HERE).decode()
    for part in blocks_of(x, 1, 32):
        amax = x[part].abs().max().item()
        scale = 2.0 ** (floor(log2(amax)) - 8) if amax else 1.0
        assert torch.equal(ours[part], (x[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("rows", [1, 16])
def test_nvfp4_has_two_scales(rows: int) -> None:
    """t = amax / (6 * 448), in fp32; a block's is amax / 6 / t, in e4m3; numbers are the nearest of the format."""
    x = matrix(M, D).float()
    ours = encode(x, Scaling(E2M1, rows, 16, "nvfp4"), HERE).decode()
    tensor = x.abs().max() / (6 * 448)
    grid = torch.tensor(sorted({sign * n for n in E2M1_NUMBERS for sign in (1, -1)}))
    for part in blocks_of(x, rows, 16):
        block = (x[part].abs().max() / 6 / tensor).clamp(2.0**-6, 448).to(torch.float8_e4m3fn).float()
        scaled = (x[part] / (block * tensor)).clamp(-6, 6)
        expected = grid[(scaled.flatten()[:, None] - grid).abs().argmin(1)].view_as(scaled) * block * tensor
        torch.testing.assert_close(ours[part], expected, rtol=1e-6, atol=0)


def test_four_bits_round_to_the_nearest_and_ties_to_the_even_code() -> None:
    grid = torch.tensor(E2M1_NUMBERS)
    assert torch.equal(round_e2m1(grid), grid)
    assert torch.equal(round_e2m1(-grid), -grid)
    middles = (grid[1:] + grid[:-1]) / 2
    assert round_e2m1(middles).tolist() == [0, 1, 1, 2, 2, 4, 4]  # 0, 1, 2 and 4 have an even last bit
    x = torch.linspace(-6, 6, 4001)
    nearest = (x.abs()[:, None] - grid).abs().min(1).values
    assert torch.equal((round_e2m1(x) - x).abs(), nearest)


def test_rounding_at_random_leaves_the_mean() -> None:
    x = torch.tensor([0.1, 0.7, 1.9, 2.3, 3.9, 5.5, -5.5, -0.3])
    uniform = torch.rand(100_000, len(x), generator=torch.Generator().manual_seed(0))
    rounded = round_e2m1(x.expand_as(uniform), uniform)
    assert set(rounded.abs().unique().tolist()) <= set(E2M1_NUMBERS)
    assert (rounded.mean(0) - x).abs().max() < 5 / 100_000**0.5  # five standard deviations of a step of 2, halved


def test_the_hadamard_transform_changes_no_product_and_spreads_one_number_over_sixteen() -> None:
    a, b = matrix(5, 50, dtype=torch.float64), matrix(7, 50, seed=1, dtype=torch.float64)
    torch.testing.assert_close(hadamard(a) @ hadamard(b).T, a @ b.T, rtol=1e-12, atol=1e-10)
    one = torch.zeros(1, 32, dtype=torch.float64)
    one[0, 20] = 1
    assert torch.equal(hadamard(one)[0, 16:].abs(), torch.full((16,), 0.25, dtype=torch.float64))
    assert not hadamard(one)[0, :16].any()


def test_delayed_scales_are_those_of_transformer_engine() -> None:
    """scale = largest / amax of the history / 2^margin; 1 at first; non-finite values are not recorded."""
    history = AmaxHistory(2, 1, 0).to_empty(device="cpu")
    history.amax_history.zero_()
    history.current.zero_()
    past, scaling = Past(history), RECIPES["delayed"].input_gradient[0]
    assert past.scale("gradient", scaling) == 1
    for amax, expected in ((4.0, 4.0), (2.0, 4.0), (1.0, 2.0), (torch.inf, 1.0), (0.5, 1.0)):
        past.see("gradient", torch.tensor([[amax / 2, -amax]]))
        history.turn(history.current)
        history.current.zero_()
        assert past.scale("gradient", scaling) == 57344 / expected / 2
    history.eval()
    past.see("gradient", torch.tensor([[9.0]]))
    assert not history.current.any()


def layer_of(recipe: str, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> Linear:
    torch.manual_seed(1)
    layer, draws = Linear(D, N, bias=bias).to(dtype), Draws()
    torch.nn.init.normal_(layer.weight, std=0.1)
    draws.numbers = torch.arange(M).view(2, -1) + 1000
    history = AmaxHistory(2, 0, 0).to_empty(device="cpu") if recipe == "delayed" else None
    if history is not None:
        history.amax_history.copy_(torch.tensor([[100.0, 50.0], [0.5, 0.4], [1.0, 3.0]]))
        history.current.zero_()
    past = None if history is None else Past(history)
    layer.put(LowPrecision(RECIPES[recipe], "layer", seed=3, draws=draws, past=past))
    return layer


def gradients_of(layer: Linear, x: torch.Tensor, dy: torch.Tensor, *, deferred: bool = False) -> list[torch.Tensor]:
    """Output, and gradients of input, weight and bias."""
    weights = WeightGradients(layer) if deferred else None
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    if weights is not None:
        draws = layer.product.draws  # type: ignore[attr-defined]
        draws.numbers = None  # another microbatch may have been computed since then
        add_weight_gradients(weights.take())
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_is_near_and_not_equal_to_the_plain_one(recipe: str) -> None:
    """Near: within the format's precision; deferred weight gradients are equal bit for bit."""
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(2, M // 2, size, generator=generator).bfloat16() for size in (D, N))
    ours, plain = gradients_of(layer_of(recipe), x, dy), layer_of(recipe)
    plain.put(type(Linear(1, 1).product)())
    expected = gradients_of(plain, x, dy)
    bound = 0.2 if RECIPES[recipe].four_bits else 0.08
    exact = {3} | ({2} if recipe == "rowwise_with_gw_hp" else set())
    for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
        relative = ((one - other).float().norm() / other.float().norm()).item()
        assert (relative < 0.01) if index in exact else (0.005 < relative < bound), (index, relative)
    again = gradients_of(layer_of(recipe), x, dy, deferred=True)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("deferred", [False, True])
def test_codes_of_the_forward_pass_serve_the_backward_pass_bit_for_bit(recipe: str, deferred: bool) -> None:
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    layer, saved = layer_of(recipe), list[torch.Tensor]()
    layer.product.keeps_codes = True  # type: ignore[attr-defined]
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        ours = gradients_of(layer, x, dy, deferred=deferred)
    for one, other in zip(ours, gradients_of(layer_of(recipe), x, dy), strict=True):
        assert torch.equal(one, other)
    activations = [tensor for tensor in saved if tensor is not layer.weight]
    assert sum(tensor.numel() * tensor.itemsize for tensor in activations) == M * D + 4


def test_codes_of_blocks_are_quantized_once_more_in_the_other_direction() -> None:
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    layer, scaling = layer_of("blockwise"), RECIPES["blockwise"].forward[0]
    layer.product.keeps_codes = True  # type: ignore[attr-defined]
    y, x_grad, weight_grad, _ = gradients_of(layer, x, dy)
    plain = gradients_of(layer_of("blockwise"), x, dy)
    assert torch.equal(y, plain[0])
    assert torch.equal(x_grad, plain[1])
    once = encode(x.flatten(0, 1), scaling, HERE).decode()
    again, of_dy = (encode(part.t(), scaling, HERE).decode() for part in (once, dy.flatten(0, 1)))
    assert torch.equal(weight_grad, linear(of_dy, again).bfloat16())
    assert 0 < (weight_grad - plain[2]).float().norm() < 0.05 * plain[2].float().norm()


def test_layers_that_read_the_same_input_quantize_it_once() -> None:
    layers, last, seen = [layer_of("tensorwise") for _ in range(2)], LastEncoded[Any](2), list[int]()
    for layer in layers:
        product = layer.product
        assert isinstance(product, LowPrecision)
        product.last, product.keeps_codes = last, True
    x = matrix(2, M // 2, D).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: seen.append(kept.data_ptr()) or kept, lambda kept: kept):
        first, second = (layer(x) for layer in layers)
    assert len(set(seen)) == len(seen) - 2  # codes and scale are the same tensors
    assert torch.equal(first, second)
    assert last._of is None, "codes outlive their last reader"
    with torch.no_grad():
        x.mul_(3)
    assert torch.equal(layers[0](x), layer_of("tensorwise")(x))
    with torch.no_grad():
        x.mul_(3)
    assert torch.equal(layers[1](x), layer_of("tensorwise")(x)), "codes of the numbers before"
    del x, first, second
    assert last._of is None


def test_gradients_are_rounded_by_the_numbers_of_tokens_alone() -> None:
    whole, part, other = (layer_of("nvfp4", torch.float32) for _ in range(3))
    everything = {}
    for layer, rows in ((whole, slice(0, M)), (part, slice(16, 32)), (other, slice(16, 32))):
        draws = layer.product.draws  # type: ignore[attr-defined]
        draws.numbers = torch.arange(M)[None, rows] + (1 if layer is other else 0)
        numbers = layer.product._numbers(layer.product.noted({}))  # type: ignore[attr-defined]
        everything[layer] = layer.product._uniform("input gradient", numbers, slice(0, N), N)  # type: ignore[attr-defined]
    assert torch.equal(everything[whole][16:32], everything[part])
    assert torch.equal(everything[other][:-1], everything[part][1:])
    assert 0.4 < everything[whole].mean() < 0.6
    assert 0 <= everything[whole].min() < everything[whole].max() < 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_matrix_quantized_in_parts_has_the_same_bits(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    whole = gradients_of(layer_of(recipe), x, dy)
    monkeypatch.setitem(AT_ONCE, "cpu", 5 * D)  # parts of 5 rows, or of one row of blocks
    assert all(torch.equal(*pair) for pair in zip(gradients_of(layer_of(recipe), x, dy), whole, strict=True))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch._scaled_mm is not on CPUs")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_kernels_multiply_what_is_emulated(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel on a CPU replaces a GPU's: the same codes and scales, in the layout that it requires."""
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    emulated = gradients_of(layer_of(recipe, bias=False), x, dy)
    calls, fast = [], []
    monkeypatch.setattr(low_precision, "has_kernel", lambda *_: calls.append(1) or True)
    scaled_mm = torch.nn.functional.scaled_mm

    def recorded(*args: Any, use_fast_accum: bool, **options: Any) -> torch.Tensor:
        fast.append(use_fast_accum)
        return scaled_mm(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", recorded)
    for ours, other in zip(gradients_of(layer_of(recipe, bias=False), x, dy), emulated, strict=True):
        torch.testing.assert_close(ours, other, rtol=2**-7, atol=1e-3 * other.abs().max().item())
    assert len(calls) == 3
    assert fast == [True, False, False]  # forward passes alone may sum in fewer bits


class Seen(torch_internals.DispatchMode):
    """Which operations have run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch._scaled_mm is not on CPUs")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_selective_recomputation_keeps_what_kernels_return(recipe: str) -> None:
    layer = layer_of(recipe, bias=False)
    product = layer.product
    assert isinstance(product, LowPrecision)
    product.kernel = True
    with Seen() as seen:
        layer(matrix(2, M // 2, D))
    assert len(seen.ops & KEPT) == 1
    assert not seen.ops & set(PRODUCTS)


@pytest.mark.parametrize(("capability", "names"), [((8, 6), set()), ((8, 9), set(KERNELS)), ((9, 0), set(KERNELS))])
def test_kernels_are_used_from_ada_on(
    capability: tuple[int, int], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    assert {name for name, recipe in RECIPES.items() if has_kernel(recipe, gpu, torch.bfloat16)} == names
    assert not any(has_kernel(recipe, gpu, torch.float32) for recipe in RECIPES.values())


def test_a_rehearsal_takes_kernels_only_where_the_gpu_multiplies_fp8() -> None:
    run = narrow_run(LayoutSpec(), "rowwise")
    model = build_here(run).model
    products = [layer.product for layer in model.modules() if isinstance(layer, Linear)]
    for has, kernel in ((False, None), (True, True)):
        fill_slots(model, run, on_gpu=True, fp8=has)
        found = {product.kernel for product in products if isinstance(product, LowPrecision)}
        assert found == {kernel}


def test_codes_are_kept_for_layers_that_read_the_same_input() -> None:
    """And for no other: its codes would live as long as its input, which is until the backward pass."""
    trainer = build_here(narrow_run(LayoutSpec(), "rowwise"))
    lasts = {
        name: layer.product.last
        for name, layer in trainer.model.named_modules()
        if isinstance(layer, Linear) and isinstance(layer.product, LowPrecision)
    }
    attention, ffn = "layers.0.attention.", "layers.0.feed_forward."
    assert lasts[f"{attention}wq"] is lasts[f"{attention}wk"] is lasts[f"{attention}wv"] is not None
    assert lasts[f"{ffn}w1"] is lasts[f"{ffn}w3"] is not lasts[f"{attention}wq"]
    assert lasts[f"{attention}wo"] is lasts[f"{ffn}w2"] is None
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    assert all(last is None or last._of is None for last in lasts.values())


def test_kept_layers_are_named_by_pattern() -> None:
    table = parameter_table(narrow_run(LayoutSpec(), "tensorwise").model)

    def layers(*keep: str) -> tuple[str, ...]:
        return low_precision_layers(table, TrainingSpec(precision="fp8", low_precision={"keep": keep}))  # type: ignore

    assert len(layers()) == 14
    assert all(name.startswith("layers.1.") for name in layers("layers.0"))
    assert layers("layers.-2.*") == layers("layers.0")
    assert not any(name.endswith("wo") for name in layers("*.wo"))
    assert layers("layers.0", "layers.1.attention") == tuple(f"layers.1.feed_forward.w{i}" for i in (1, 2, 3))
    with pytest.raises(UserError, match=r"'layers\.7' matches no linear layer.*layers\.0\.attention\.wq"):
        layers("layers.7")
    with pytest.raises(UserError, match="leaves no layer in fp8"):
        layers("*")


def misfits(run: ResolvedRun, **layout: Any) -> str:
    model, training = run.model, run.run.training
    degrees = LayoutSpec(**layout)
    table = parameter_table(model)
    return "; ".join(low_precision_misfits(training, table, model, run.run.finetune, degrees, 256))


def test_no_block_lies_on_two_ranks() -> None:
    run = narrow_run(LayoutSpec(), "blockwise")
    assert not misfits(run, tp=2)
    assert "64 of the 256 outputs of layers.0.attention.wq are not a multiple of 128" in misfits(run, tp=4)
    assert not misfits(run, cp=2, cp_method="ulysses")
    assert "runs of 64, no multiple of 128" in misfits(run, cp=2, cp_method="ring")
    assert not misfits(narrow_run(LayoutSpec(), "mxfp8"), tp=4, cp=2, cp_method="ring")
    assert not misfits(narrow_run(LayoutSpec(), "tensorwise"), tp=4, cp=4)


def test_a_gradient_of_which_ranks_have_shares_has_no_scale() -> None:
    run = narrow_run(LayoutSpec(), "tensorwise")
    shared = run.model_copy(update={"model": run.model.model_copy(update={"num_kv_heads": 2})})
    assert "keep=[*.attention.wk, *.attention.wv]" in misfits(shared, tp=4)
    assert not misfits(shared, tp=2)


def test_an_experts_rows_on_several_ranks_have_one_scale_or_none() -> None:
    for recipe in ("blockwise", "mxfp8", "nvfp4"):
        run = run_of_experts(LayoutSpec(), recipe)
        assert "rows of an expert share a scale, but lie on several ranks" in misfits(run, tp=2)
        assert not misfits(run, dp_shard=2, ep=2)
        kept = run_of_experts(LayoutSpec(), recipe, low_precision={"keep": ("*.experts",)})
        assert not misfits(kept, tp=2)
    run = run_of_experts(LayoutSpec(), "rowwise")
    assert "use an ep that divides 4 or is a multiple of it" in misfits(run, cp=4, dp_shard=3, ep=6)
    assert not misfits(run, cp=2, tp=2, ep=2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_expert_is_a_linear_layer_of_its_own(recipe: str) -> None:
    """Three experts, one without rows, and rows of two microbatches: outputs and gradients bit for bit."""
    counts, generator = [[M, 16], [0, 0], [0, 32]], torch.Generator().manual_seed(4)
    x, dy = (torch.randn(M + 48, size, generator=generator).bfloat16() for size in (D, N))
    numbers = torch.arange(1000, 1000 + M + 48)
    layers = [layer_of(recipe, bias=False) for _ in counts]
    experts = ExpertLinear(len(counts), D, N).bfloat16()
    experts.weight.data.copy_(torch.stack([layer.weight.detach() for layer in layers]))
    experts.product = GroupedLowPrecision([layer.product for layer in layers])  # type: ignore[misc]
    x.requires_grad_()
    y = experts(x, Rows(torch.tensor(counts), numbers))
    y.backward(dy)
    assert x.grad is not None
    assert experts.weight.grad is not None
    start = 0
    for expert, of_microbatches in enumerate(counts):
        total = torch.zeros(N, D, dtype=torch.bfloat16)
        for count in filter(None, of_microbatches):
            rows = slice(start, start := start + count)
            layer = layer_of(recipe, bias=False)
            layer.product.draws.numbers = numbers[rows]  # type: ignore[attr-defined]
            y_of, x_grad, weight_grad = gradients_of(layer, x.detach()[rows], dy[rows])
            assert torch.equal(y[rows], y_of)
            assert torch.equal(x.grad[rows], x_grad)
            total += weight_grad
        assert torch.equal(experts.weight.grad[expert], total)


@pytest.mark.parametrize(
    ("training", "why"),
    [
        ({"precision": "bf16", "low_precision": {"recipe": "rowwise"}}, "needs precision fp8, mxfp8, nvfp4"),
        ({"precision": "mxfp8", "low_precision": {"recipe": "rowwise"}}, "is a recipe of fp8"),
        ({"precision": "mxfp8", "low_precision": {"saved_inputs": "codes"}}, "mxfp8 quantize the input again"),
        ({"precision": "fp8", "low_precision": {"margin": 1}}, "margin only applies to recipe=delayed"),
    ],
)
def test_settings_that_say_nothing_are_refused(training: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TrainingSpec.model_validate(training)


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler asks for it
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_compiled_products_are_the_same_bit_for_bit(recipe: str) -> None:
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    eager, layer = gradients_of(layer_of(recipe), x, dy), layer_of(recipe)
    torch._dynamo.reset()
    x.requires_grad_()
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    y.backward(dy)
    for ours, expected in zip((y, x.grad, layer.weight.grad, layer.bias.grad), eager, strict=True):
        assert ours is not None
        assert torch.equal(ours, expected)
    if recipe == "delayed":
        history = layer.product.past.history  # type: ignore[attr-defined]
        largest = [tensor.abs().max().float() for tensor in (x, layer.weight, dy)]
        assert history.current.tolist() == [value.item() for value in largest]


# ---- torchao ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_is_torchaos_bit_for_bit(recipe: str, bias: bool) -> None:
    """Output and all gradients, emulated by both."""
    config_module = pytest.importorskip("torchao.float8.config")
    linear_module = pytest.importorskip("torchao.float8.float8_linear")
    config = config_module.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True)
    ours = layer_of(recipe, bias=bias)
    plain = torch.nn.Linear(D, N, bias=bias).bfloat16()
    plain.load_state_dict(ours.state_dict())
    theirs = linear_module.Float8Linear.from_float(plain, config)
    x, dy = matrix(2, M // 2, D), matrix(2, M // 2, N, seed=5)
    other = x.detach().requires_grad_()
    y = theirs(other)
    y.backward(dy)
    expected = [y, other.grad, theirs.weight.grad, *([theirs.bias.grad] if bias else [])]
    for name, one, two in zip(("y", "x", "weight", "bias"), gradients_of(ours, x, dy), expected, strict=False):
        assert two is not None
        assert torch.equal(one, two), name


def test_mx_and_nvfp4_are_torchaos_bit_for_bit() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    fp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = matrix(M, D)
    exponents, codes = mx.to_mx(x, torch.float8_e4m3fn, 32)
    expected = codes.float() * exponents.float().repeat_interleave(32, 1)
    assert torch.equal(encode(x, Scaling(E4M3, 1, 32, "e8m0"), HERE).decode(), expected)
    tensor = fp4.per_tensor_amax_to_scale(x.abs().max())
    theirs = fp4.NVFP4Tensor.to_nvfp4(x.float(), per_tensor_scale=tensor).dequantize(torch.float32)
    assert torch.equal(encode(x, Scaling(E2M1, 1, 16, "nvfp4"), HERE).decode(), theirs)


def test_blocks_are_torchaos_bit_for_bit() -> None:
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = matrix(256, 384)
    for scaling, quantize in (
        (Scaling(E4M3, 1, 128), kernels.torch_blockwise_scale_act_quant_lhs),
        (Scaling(E4M3, 128, 128), kernels.torch_blockwise_scale_weight_quant),
    ):
        codes, _ = quantize(x.float())
        ours = encode(x, scaling, HERE)
        assert torch.equal(ours.whole(ours.codes).float(), codes.float())


# ---- memory ----------------------------------------------------------------------------------------------------------


def saved_bytes(run: ResolvedRun) -> int:
    """Bytes of all tensors that a first microbatch saves for its backward pass."""
    trainer, storages = build_here(run), dict[int, torch.UntypedStorage]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with loader_for(trainer) as loader, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.train_step.gradients(loader.microbatches(0)[:1])
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("make", [narrow_run, run_of_experts])
@pytest.mark.every(1)
def test_codes_that_are_kept_take_the_bytes_that_the_plan_says(recipe: str, make: Any) -> None:
    measured, planned = [], []
    for saved in ("full", "codes"):
        run = make(LayoutSpec(), recipe, low_precision={"compute": "bf16", "saved_inputs": saved})
        job = engine_job(run.run, blueprint(run.model), global_batch=run.global_batch, micro_batch=1)
        measured.append(saved_bytes(run))
        planned.append(run.model.num_layers * block_activations(job, job.model.kinds[0], "none"))
    scales = 2 * 4 * (1 + 2 * 4 if make is run_of_experts else 4)
    assert measured[0] - measured[1] == pytest.approx(planned[0] - planned[1], abs=scales)
    assert planned[0] - planned[1] > 20 * scales
