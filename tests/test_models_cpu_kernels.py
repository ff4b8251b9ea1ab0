"""The kernels chosen for CPUs compute the same as torch's, and are actually used."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from meshwright.models import cpu_kernels
from meshwright.models.cpu_kernels import causal_attention, gelu_tanh, matmul, serves_training
from meshwright.models.linear import Linear

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def assert_product(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | float = 0) -> None:
    """`start + a @ b` in fp32: n + 1 rounded operations per sum err by (n + 1) eps of the sum of absolute terms."""
    exact, terms = start + a.double() @ b.double(), abs(start) + a.double().abs() @ b.double().abs()
    bound = (a.shape[-1] + 1) * torch.finfo(torch.float32).eps * terms
    assert found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the products computed by oneDNN."""
    if not cpu_kernels.ONEDNN:
        pytest.skip("this torch was built without oneDNN")
    seen: list[torch.dtype] = []
    original = cpu_kernels._onednn
    monkeypatch.setattr(cpu_kernels, "_onednn", lambda *args: (seen.append(args[0].dtype), original(*args))[1])
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_linear(calls: list[torch.dtype], bias: bool, turned: bool) -> None:
    """Forward and both gradients, for contiguous and for strided rows."""
    layer, shape = Linear(33, 70, bias=bias), (20, 3) if turned else (3, 20)
    x = random(*shape, 33).requires_grad_()
    rows, grad = x.transpose(0, 1) if turned else x, random(3, 20, 70)
    y = layer(rows)
    y.backward(grad)
    assert calls == [torch.float32] * 3
    weight, rows_ND, grad_NM = layer.weight.detach(), rows.detach().flatten(0, 1), grad.flatten(0, 1)
    assert_product(y.detach().flatten(0, 1), rows_ND, weight.t(), layer.bias.detach().double() if bias else 0)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert_product((x.grad.transpose(0, 1) if turned else x.grad).flatten(0, 1), grad_NM, weight)
    assert_product(layer.weight.grad, grad_NM.t(), rows_ND)
    if bias:
        assert_product(layer.bias.grad, torch.ones(60), grad_NM)


def test_linear_makes_only_the_gradients_that_are_asked_for(calls: list[torch.dtype]) -> None:
    layer = Linear(8, 8).requires_grad_(False)
    layer(random(4, 8).requires_grad_()).sum().backward()
    assert len(calls) == 2
    assert layer.weight.grad is None


def test_products_without_autograd(calls: list[torch.dtype]) -> None:
    a, b = random(900, 40), random(40, 30)
    assert_product(matmul(a, b), a, b)
    assert_product(matmul(a.t(), a), a.t(), a)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(calls: list[torch.dtype], dtype: torch.dtype) -> None:
    layer, x = Linear(8, 8).to(dtype), random(4, 8).to(dtype)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=0, atol=0)
    torch.testing.assert_close(matmul(x, x.t()), x @ x.t(), rtol=0, atol=0)
    assert matmul(x, x.t(), room := torch.empty(4, 4, dtype=dtype)) is room
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [5, 64, 300, 700])
def test_attention(monkeypatch: pytest.MonkeyPatch, groups: int, length: int) -> None:
    """As close to float64 as torch's own bf16 kernels, over several blocks of queries and several pairs of heads.

    Both round every probability and every result to bf16. torch rounds before it divides by the row's sum, when the
    largest is exactly 1; ours rounds after. So ours has at most a second error of the size of the result's own
    rounding.
    """
    monkeypatch.setattr(cpu_kernels, "SCORES", 3 * 128 * length)
    q, k, v, grad = (random(3, length, heads, 16).bfloat16().transpose(1, 2) for heads in (4, groups, groups, 4))
    q *= 4  # peaked distributions, where rounded scores would hurt most

    def gradients(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in (q, k, v)]
        y = attend(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))]

    def torchs(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    exact = gradients(torchs, torch.float64)
    for found, usual, true in zip(
        gradients(causal_attention, torch.bfloat16), gradients(torchs, torch.bfloat16), exact, strict=True
    ):
        assert found.dtype == torch.bfloat16
        error, usual_error = ((tensor.double() - true).norm() / true.norm() for tensor in (found, usual))
        assert error < 2**0.5 * usual_error < 0.02


def test_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient over several chunks: one rounding to bf16 for the value, two for the gradient."""
    monkeypatch.setattr(cpu_kernels, "GELUS", 1000)
    x, grad = ((4 * random(3, 700)).bfloat16() for _ in range(2))
    y = gelu_tanh(x.requires_grad_())
    y.backward(grad)
    exact = x.detach().double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(grad.double())
    assert x.grad is not None
    assert exact.grad is not None
    unit = torch.finfo(torch.bfloat16).eps / 2
    fp32 = 32 * torch.finfo(torch.float32).eps  # of the few operations on values up to 16 before the rounding
    for found, true, roundings in ((y, F.gelu(exact, approximate="tanh"), 1), (x.grad, exact.grad, 2)):
        slack = fp32 * (1 + grad.double().abs())
        assert ((found.double() - true).abs() <= ((1 + unit) ** roundings - 1) * true.abs() + slack).all()


def test_own_kernels_serve_training_in_bf16_only() -> None:
    q = random(1, 2, 4, 8)
    assert serves_training(q.bfloat16().requires_grad_())
    assert not serves_training(q.requires_grad_())
    assert not serves_training(q.bfloat16().detach())
    with torch.no_grad():
        assert not serves_training(q.bfloat16().requires_grad_())


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    """Without it, each of the forty tensors is mapped separately, 10,240 pages each. With it, the heap moves a few
    times at first, when a small block follows a tensor (at most five times in 150 random heaps)."""
    code = """if True:
        import resource, torch
        from meshwright.trainer.device import keep_freed_memory
        keep_freed_memory()
        moves = 0
        for _ in range(40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.empty(10 * 2**20)[::1024].fill_(1)  # 40 MiB, one number of each page
            moves += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 1000
        print(moves)
    """
    if sys.platform != "linux":
        pytest.skip("only glibc has this setting")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 10
