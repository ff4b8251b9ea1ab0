"""Head and cross-entropy in chunks equal torch's own, value and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright.models import loss as loss_module
from meshwright.models.loss import linear_cross_entropy, linear_token_losses

N, D, V = 23, 8, 37


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks, and several pieces of each, so that every boundary is crossed."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", {"cpu": 64 * 8 * 7})
    monkeypatch.setattr(loss_module, "WIDE_BYTES", {"cpu": V * 8 * 3})


def case(dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(N, D, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="sum")


def gradients(function, hidden, weight, labels, factor=1.0):
    value = function(hidden, weight, labels)
    return value, *torch.autograd.grad(value * factor, (hidden, weight))


@pytest.mark.parametrize("scale", [1.0, 300.0])  # at 300, most probabilities underflow and no loss may
def test_equals_torch_in_fp64(scale):
    ours = gradients(linear_cross_entropy, *case(scale=scale), factor=0.25)
    torchs = gradients(reference, *case(scale=scale), factor=0.25)
    torch.testing.assert_close(ours, torchs, rtol=1e-13, atol=1e-13 * scale)


def test_terms_one_by_one():
    """Each term's gradient is known only in the backward pass."""
    factors = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def ours(hidden, weight, labels):
        return (linear_token_losses(hidden, weight, labels) * factors).sum()

    def torchs(hidden, weight, labels):
        return (F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="none") * factors).sum()

    torch.testing.assert_close(gradients(ours, *case()), gradients(torchs, *case()), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_padding_of_logits_is_zero(dtype, monkeypatch):
    """On processors with AMX, oneDNN's product reads past a row's end, up to a multiple of 32: 0 x NaN is NaN."""
    uninitialised = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: uninitialised(*a, **k).fill_(torch.nan))
    hidden, weight, labels = (tensor.detach() for tensor in case(dtype))
    for *_, logits_CV in loss_module.logit_chunks(hidden, weight, labels, None):
        if logits_CV.stride(0) > V:  # else the product has made its own memory
            rows = torch.as_strided(logits_CV, (len(logits_CV), logits_CV.stride(0)), logits_CV.stride())
            assert not rows[:, V:].any()
    assert all(torch.isfinite(tensor).all() for tensor in gradients(linear_cross_entropy, *case(dtype)))


@pytest.mark.slow
def test_gradcheck():
    hidden, weight, labels = case()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))


def test_tied_weight_sums_both_uses():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).requires_grad_()
    tokens, labels = torch.randint(V, (2, N), generator=generator)
    ours, theirs = (
        torch.autograd.grad(function(F.embedding(tokens, weight), weight, labels), weight)
        for function in (linear_cross_entropy, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_rounds_only_its_own_products(dtype):
    """Compared with fp64 on the same rounded inputs: logits, their gradient and each product are rounded once."""
    hidden, weight, labels = case(dtype)
    loss, grad_hidden, grad_weight = gradients(linear_cross_entropy, hidden, weight, labels)
    assert (loss.dtype, grad_hidden.dtype, grad_weight.dtype) == (torch.float32, dtype, dtype)
    exact = gradients(reference, *(x.detach().double().requires_grad_() for x in (hidden, weight)), labels)
    step = torch.finfo(dtype).eps / 2
    largest = (hidden.double() @ weight.double().T).abs().max().item()
    # A logit's error moves a token's loss by at most itself; fp32 sums add their own few steps.
    assert abs(loss.item() - exact[0].item()) <= N * largest * max(step, 8 * torch.finfo(torch.float32).eps)
    # A probability, below 1, moves by its logit's error (twice: numerator and sum) and its own rounding.
    entry = 2 * largest * step + step
    for grad, truth, other in ((grad_hidden, exact[1], weight), (grad_weight, exact[2], hidden)):
        terms = V if other is weight else N
        bound = terms * entry * other.abs().max().item() + 4 * step * truth.abs().max().item()
        assert (grad.double() - truth).abs().max().item() <= bound


def test_nothing_to_train_on_is_zero():
    hidden, weight, labels = case()
    value, *grads = gradients(linear_cross_entropy, hidden, weight, torch.full_like(labels, -100))
    assert value.item() == 0
    assert all(not grad.any() for grad in grads)


def test_ignored_tokens_cannot_spread_their_values():
    hidden, weight, labels = case()
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = float("nan")
    poisoned.requires_grad_()
    ours = gradients(linear_cross_entropy, poisoned, weight, labels)
    torch.testing.assert_close(ours, gradients(linear_cross_entropy, hidden, weight, labels), rtol=0, atol=0)


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_outside_the_vocabulary(label):
    hidden, weight, labels = case()
    labels[3] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)


def test_no_tokens():
    hidden, weight, labels = case()
    value, grad_hidden, grad_weight = gradients(linear_cross_entropy, hidden[:0], weight, labels[:0])
    assert value.item() == 0
    assert not grad_hidden.any()
    assert not grad_weight.any()


def test_only_needed_gradients_are_computed(monkeypatch):
    hidden, weight, labels = case()
    products = []
    monkeypatch.setattr(loss_module, "add_product_", lambda *_: products.append("weight"))
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    with torch.no_grad():
        value = linear_cross_entropy(hidden, weight, labels)
    assert not products
    assert not value.requires_grad
    torch.testing.assert_close(value, reference(hidden, weight, labels).detach(), rtol=1e-13, atol=0)


def test_backward_twice():
    hidden, weight, labels = case()
    value = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value, (hidden, weight)), first, rtol=0, atol=0)


def test_never_holds_all_logits():
    """The largest intermediate tensor has no more rows of logits than the budget allows."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] >= V:
                Largest.seen = max(Largest.seen, out.untyped_storage().nbytes())
            return out

    with Largest():
        linear_cross_entropy(*case()).backward()
    assert 0 < Largest.seen <= 64 * 8 * 7 < N * V * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_passes_give_the_same_numbers(monkeypatch, dtype):
    """A GPU's order of operations, on a CPU: its probabilities are rounded once, as ours."""
    hidden, weight, labels = (
        torch.randn(37, 16, dtype=dtype, requires_grad=True),
        torch.randn(101, 16, dtype=dtype, requires_grad=True),
        torch.randint(0, 101, (37,)),
    )
    labels[5] = -100
    results = []
    for soften in (loss_module._soften_from_cache, loss_module._soften_in_few_passes):
        monkeypatch.setattr(loss_module, "_soften_from_cache", soften)
        loss = linear_cross_entropy(hidden, weight, labels)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *results))


def test_a_gpu_s_softmax_makes_three_passes_over_all_logits():
    """Each costs as much as a matrix product of a small model's head."""
    logits, wide, targets = torch.randn(8, 64).bfloat16(), torch.empty(8, 64), torch.zeros(8, 1, dtype=torch.int64)
    passes = {}
    for soften in (loss_module._soften_from_cache, loss_module._soften_in_few_passes):
        with Large(8 * 64) as large:
            soften(logits, targets, wide, *(torch.empty(8, 1) for _ in range(4)))
        passes[soften.__name__] = large.names
    assert len(passes["_soften_from_cache"]) == 5
    assert passes["_soften_in_few_passes"] == ["max", "softmax", "copy_"]


class Large(TorchFunctionMode):
    """The functions that read all of a tensor of a size, without those that look up a few numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.names = size, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in ("gather", "__get__") and any(
            isinstance(one, torch.Tensor) and one.numel() == self._size for one in args
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
