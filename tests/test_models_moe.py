"""Experts compute their formula under any load; loads are counted and balanced."""

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from losses import logits_of, summed_loss
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.models.moe import MoE, Router, grouped_matmul
from meshwright.spec.model import ModelFields

SIZES = {"hidden": 16, "num_layers": 2, "num_heads": 2, "vocab": 40, "max_positions": 32, "init_std": 0.3}
DEEPSEEK = {"kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 2, "v_head_dim": 6, "dense_layers": 0}
TOKENS = torch.randint(40, (3, 10), generator=torch.Generator().manual_seed(1))


def built(family="mixtral", dtype=torch.float64, **fields):
    experts = {"ffn": 24, "num_experts": 6, "experts_per_token": 2, "balance_loss": 0.5}
    spec = resolve_model(ModelFields(family=family, **{**SIZES, **experts, **fields}), base_dir=Path())
    model = build_model(spec, device="cpu", dtype=dtype)
    initialize(model, parameter_table(spec), 0)
    return model


def layers(model) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def weigh(model, sequence_weight: float) -> None:
    for layer in layers(model):
        layer.router.sequence_weight = sequence_weight


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_every_token_alone(dtype, tolerance):
    """Compared with the formula, token by token: the loop of fp64 and the kernel of fp32."""
    layer = layers(built(dtype=dtype))[0]
    x = torch.randn(2, 7, 16, dtype=dtype, generator=torch.Generator().manual_seed(2))
    experts = layer.experts
    for b, t in ((b, t) for b in range(2) for t in range(7)):
        scores = (layer.router.weight @ x[b, t]).softmax(-1)
        weights, chosen = scores.topk(2)
        expected = torch.zeros(16, dtype=dtype)
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            w1, w2, w3 = (linear.weight[e] for linear in (experts.w1, experts.w2, experts.w3))
            expected += weight * (w2 @ (F.silu(w1 @ x[b, t]) * (w3 @ x[b, t])))
        torch.testing.assert_close(layer(x)[b, t], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 12, 7])
@pytest.mark.parametrize("counts", [[5, 0, 4, 0], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_grouped_products_equal_a_loop(dtype, width, counts):
    """Whether torch's kernel applies or not, also with experts without tokens: their gradient is zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 16, width, generator=generator).to(dtype).requires_grad_()
    y = grouped_matmul(x, weight, torch.tensor(counts))
    factor = torch.randn(y.shape, generator=generator)
    (y * factor).sum().backward()
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    expected = grouped_matmul(exact_x, exact_weight, torch.tensor(counts))
    (expected * factor).sum().backward()
    tolerance = {"rtol": 0, "atol": 64 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, **tolerance)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, **tolerance)
    assert not weight.grad[torch.tensor(counts) == 0].any()


def test_a_wrong_number_of_experts_is_refused():
    with pytest.raises(ValueError, match="experts_per_token=7 of 6 experts to choose from: too many"):
        built(experts_per_token=7)


def recorded(model, monkeypatch) -> list[torch.Tensor]:
    """The balance losses of the following forward passes, a scalar for each layer."""
    losses = []
    formula = Router._balance_loss

    def record(self, scores, counts):
        loss = formula(self, scores, counts)
        losses.append(loss)
        return loss

    monkeypatch.setattr(Router, "_balance_loss", record)
    weigh(model, 0.125)
    return losses


def test_the_balance_loss_of_a_sequence_is_mixtrals(monkeypatch):
    model = built()
    losses, logits = recorded(model, monkeypatch), []
    for layer in layers(model):
        layer.router.register_forward_pre_hook(
            lambda module, inputs: logits.append(inputs[0].flatten(0, 1) @ module.weight.T)
        )
    logits_of(model, TOKENS[:1])
    for loss, of_layer in zip(losses, logits, strict=True):
        # Theirs counts in fp32.
        torch.testing.assert_close(loss.float(), load_balancing_loss_func((of_layer,), 6, 2).float())


def test_the_balance_loss_joins_the_gradient_with_its_weight(monkeypatch):
    """As if it had been added to the loss: coefficient x weight x the sum over layers and sequences."""
    model = built()
    summed_loss(model, TOKENS, TOKENS).backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    losses = recorded(model, monkeypatch)
    model.zero_grad()
    loss = summed_loss(model, TOKENS, TOKENS)
    weigh(model, 0.0)  # else each loss would include those below it
    balance = torch.autograd.grad(sum(losses), list(model.parameters()), allow_unused=True, retain_graph=True)
    weigh(model, 0.125)
    loss.backward()
    assert any(part is not None and part.abs().max() > 1e-3 for part in balance)
    for parameter, plain, part in zip(model.parameters(), alone, balance, strict=True):
        expected = plain if part is None else plain + 0.5 * 0.125 * part
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {}),
        ("deepseek_v3", DEEPSEEK | {"router_groups": 1, "router_top_groups": 1}),
        ("gpt_oss", {"num_kv_heads": 2}),
    ],
)
def test_the_z_loss_joins_the_gradient_with_its_weight(family, fields):
    """As if coefficient x weight x the mean over tokens of logsumexp squared (Zoph et al., 2022, eq. 5) were added for
    every layer and sequence: router scores of every kind, also with biases."""
    model, logits = built(family, **{**fields, "balance_loss": 0.0, "router_z_loss": 0.5}), []
    summed_loss(model, TOKENS, TOKENS).backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    for layer in layers(model):
        bias = 0.0 if layer.router.logit_bias is None else layer.router.logit_bias
        layer.router.register_forward_pre_hook(
            lambda module, inputs, bias=bias: logits.append(inputs[0] @ module.weight.T + bias)
        )
    weigh(model, 0.125)
    model.zero_grad()
    loss = summed_loss(model, TOKENS, TOKENS)
    weigh(model, 0.0)  # else each loss would include those below it
    z = sum(x.exp().sum(-1).log().square().mean(1).sum() for x in logits)
    parts = torch.autograd.grad(z, list(model.parameters()), allow_unused=True, retain_graph=True)
    weigh(model, 0.125)
    loss.backward()
    assert any(part is not None and part.abs().max() > 1e-3 for part in parts)
    for parameter, plain, part in zip(model.parameters(), alone, parts, strict=True):
        expected = plain if part is None else plain + 0.5 * 0.125 * part
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)


def test_no_loss_joins_where_none_is_asked_for():
    for fields, weight in (({}, 0.0), ({"balance_loss": 0.0}, 0.125)):
        model, plain = built(**fields), built(**fields)
        weigh(model, weight)
        for each in (model, plain):
            summed_loss(each, TOKENS, TOKENS).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("recomputed", [False, True])
def test_loads_are_counted_once(recomputed):
    """Once for every microbatch that has a backward pass, even if blocks are recomputed for it."""
    model = built()
    for block in model.layers.values() if recomputed else ():
        block.wrap(lambda compute: functools.partial(checkpoint, compute, use_reentrant=False))
    for _ in range(3):
        summed_loss(model, TOKENS, TOKENS).backward()
    with torch.no_grad():
        summed_loss(model, TOKENS, TOKENS)
    for layer in layers(model):
        load = layer.router.take_load()
        assert load.dtype == torch.int64
        assert load.sum() == 3 * TOKENS.numel() * 2
        assert not layer.router.take_load().any()


def test_an_expert_that_nobody_chooses():
    """Its gradient is zero, and that of the others is not."""
    layer = layers(built())[0]
    with torch.no_grad():
        layer.router.weight[4] = -10
    x = torch.rand(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layer(x).square().sum().backward()
    assert layer.router.take_load()[4] == 0
    for linear in layer.experts.children():
        assert linear.weight.grad.isfinite().all()
        assert not linear.weight.grad[4].any()
        assert linear.weight.grad.any()


def test_groups_limit_the_choice():
    """Of 4 groups of 3 experts only 2 are used: no token goes to more."""
    groups = {"num_experts": 12, "experts_per_token": 4, "router_groups": 4, "router_top_groups": 2}
    router = layers(built("deepseek_v3", **DEEPSEEK, **groups))[0].router
    _, experts, _ = router(torch.randn(3, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    used = [set((token // 3).tolist()) for token in experts.flatten(0, 1)]
    assert {len(groups) for groups in used} == {2}
    assert set.union(*used) == {0, 1, 2, 3}


@pytest.mark.slow
def test_biases_move_loads_towards_the_mean():
    """A bias affects the choice but not the weights; step by step it makes uneven loads even."""
    options = {"router_groups": 1, "router_top_groups": 1, "balance_rate": 0.01, "balance_loss": 0.0}
    model = built("deepseek_v3", **DEEPSEEK, **options)
    tokens = torch.randint(40, (8, 32), generator=torch.Generator().manual_seed(1))
    spreads = []
    for _ in range(60):
        summed_loss(model, tokens, tokens).backward()
        loads = [layer.router.take_load() for layer in layers(model)]
        spreads.append(max((load.max() / load.double().mean()).item() for load in loads))
        for layer, load in zip(layers(model), loads, strict=True):
            before = layer.router.bias.clone()
            layer.router.move_bias(load)
            moved = layer.router.bias - before
            torch.testing.assert_close(moved, 0.01 * (load.double().mean() - load).sign(), rtol=0, atol=1e-15)
    assert spreads[0] > 1.4
    assert max(spreads[-5:]) < 1.15
    assert all(layer.router.bias.grad is None for layer in layers(model))


def test_a_bias_chooses_but_does_not_weigh():
    options = {"router_groups": 1, "router_top_groups": 1, "router_scale": 1.0}
    layer = layers(built("deepseek_v3", **DEEPSEEK, **options))[0]
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer.router.bias[:2] = 100
    weights, experts, _ = layer.router(x)
    scores = (x @ layer.router.weight.T).sigmoid()[..., :2]
    assert set(experts.flatten().tolist()) == {0, 1}
    expected = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected.gather(-1, experts), rtol=1e-12, atol=0)


def test_biases_stay_in_fp32():
    options = {"router_groups": 1, "router_top_groups": 1}
    model = built("deepseek_v3", dtype=torch.float32, **DEEPSEEK, **options)
    layer = layers(model)[0]
    layer.router.bias[0] = 1.001  # which bf16 cannot represent
    model.bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.router.bias.dtype == torch.float32
    assert layer.router.bias[0] == torch.tensor(1.001)
    assert (
        layers(built("deepseek_v3", dtype=torch.bfloat16, **DEEPSEEK, **options))[0].router.bias.dtype == torch.float32
    )
