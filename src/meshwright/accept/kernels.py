"""Step `kernels`: what only a GPU runs, beside its definition computed on the CPU in fp64.

An error in bf16 may be twice that of the plain computation in bf16 on the same device. Codes, hashes and stochastic
rounding must have the CPU's bits.
"""

from collections.abc import Iterator
from typing import Any, get_args

import torch

from meshwright.accept.check import Check, Place, tried, within
from meshwright.accept.runs import device_of
from meshwright.devices import CPU
from meshwright.models.attention_kernels import AttentionNeeds, NamedCore, serves
from meshwright.models.blockwise import encode_int8, encode_nf4
from meshwright.models.dropout import drawn_bits, hash_key
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.low_precision import RECIPES, LowPrecision, has_kernel
from meshwright.models.masks import Documents, attention_mask
from meshwright.models.moe import grouped_matmul
from meshwright.models.partial_attention import Queries, add_part_, attend_part, attend_part_backward
from meshwright.optim.adamw import ShardedAdamW
from meshwright.optim.bf16 import round_at_random
from meshwright.spec.training import AttentionName

FACTOR = 2.0
"""Largest error of a kernel in errors of the plain computation in the same format."""
Tensors = tuple[torch.Tensor, ...]
MASKS = {
    "causal": (False, None),
    "window": (False, 50),
    "documents": (True, None),
    "documents and window": (True, 50),
}
"""Masks: whether documents are kept apart, and the window."""


def checks(place: Place) -> Iterator[Check]:
    """Attention, loss, experts, fp8, codes, optimizer."""
    yield from _attention(place)
    yield tried(_ring, "two parts of ring attention", place)
    for vocab in (1000,) if not place.on_gpu else (50257, 128256):
        yield tried(_loss, f"loss, vocabulary {vocab}", place, vocab)
    yield tried(_experts, "experts without rows", place)
    yield from _fp8(place)
    yield from _bits(place)
    yield tried(_adamw, "fused AdamW", place)


def _attention(place: Place) -> Iterator[Check]:
    """Every kernel by name with every mask; one line for all that the device lacks of a kernel."""
    for name in get_args(AttentionName):
        lacking = []
        for head_dim in (64, 128, 192) if name not in ("auto", "math") else ():
            for mask, (documents, window) in MASKS.items():
                request = AttentionNeeds(device_of(place), torch.bfloat16, head_dim, documents, window)
                if serves(name, request):
                    yield tried(
                        _attends, f"{name}, heads of {head_dim}, {mask}", name, request, 64 if not place.on_gpu else 512
                    )
                else:
                    lacking.append(f"heads of {head_dim}, {mask}")
        if lacking:
            yield Check(f"{name}, not on this device", None, "; ".join(lacking))


def _attends(title: str, name: AttentionName, request: AttentionNeeds, length: int) -> Check:
    def results(name: AttentionName, device: torch.device, dtype: torch.dtype) -> Tensors:
        mask = attention_mask(length, length, window=request.window, device=device) if request.window else None
        if request.documents:
            mask = Documents(torch.arange(length, device=device)[None] // 100, window=request.window)
        inputs = [x.to(device, dtype).requires_grad_() for x in _heads(request.head_dim, length)]
        y = NamedCore(name, request.window)(inputs[0], inputs[1], inputs[2], mask)
        y.backward(_drawn(tuple(y.shape), 9).to(y))
        return (y.detach(), *(x.grad for x in inputs if x.grad is not None))

    plain = results("math", request.device, request.dtype)
    return _no_worse(title, results(name, request.device, request.dtype), plain, results("math", CPU, torch.float64))


def _heads(head_dim: int, length: int) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2: numbers that bf16 represents."""
    return [_drawn((1, heads, length, head_dim), seed) for seed, heads in enumerate((4, 2, 2))]


def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().double()


def _no_worse(name: str, ours: Tensors, plain: Tensors, exact: Tensors) -> Check:
    """Whether the largest error of each result is within `FACTOR` of the plain computation's."""
    worst = 0.0
    for a, b, truth in zip(ours, plain, exact, strict=True):
        error, known = ((x.double().cpu() - truth).abs().max().item() for x in (a, b))
        least = torch.finfo(torch.bfloat16).eps / 2 * truth.abs().max().item()  # the result's own rounding
        worst = max(worst, error / max(known, least)) if error == error else torch.inf
    return within(name, worst, FACTOR, "largest error, in errors of the plain computation,")


def _ring(name: str, place: Place) -> Check:
    """Two parts of ring attention beside the whole."""
    device, length = device_of(place), 64 if not place.on_gpu else 512
    half = length // 2

    def parts(device: torch.device, dtype: torch.dtype) -> Tensors:
        q, k, v = (
            x.to(device, dtype)[:, :, : half if index == 0 else length] for index, x in enumerate(_heads(64, length))
        )
        y, logsumexp = attend_part(q, k[:, :, :half], v[:, :, :half], "causal")
        add_part_(y, logsumexp, *attend_part(q, k[:, :, half:], v[:, :, half:], "all"))
        queries = Queries(_drawn(tuple(y.shape), 9).to(q), q, y.to(q.dtype), logsumexp)
        gradients = attend_part_backward(queries, k[:, :, half:], v[:, :, half:], "all")
        return (y, *gradients)

    exact = parts(CPU, torch.float64)
    plain = parts(CPU, torch.bfloat16)
    return _no_worse(name, parts(device, torch.bfloat16), plain, exact)


def _loss(name: str, place: Place, vocab: int) -> Check:
    tokens, hidden = (64, 32) if not place.on_gpu else (1024, 256)
    labels = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[::7] = -100

    def loss(device: torch.device, dtype: torch.dtype) -> Tensors:
        x, head = (
            _drawn((rows, hidden), seed).mul(0.1).to(device, dtype).requires_grad_()
            for rows, seed in ((tokens, 2), (vocab, 3))
        )
        value = linear_cross_entropy(x, head, labels.to(device)) / tokens
        value.backward()
        assert x.grad is not None
        assert head.grad is not None
        return value.detach(), x.grad, head.grad

    exact = loss(CPU, torch.float64)
    return _no_worse(name, loss(device_of(place), torch.bfloat16), loss(CPU, torch.bfloat16), exact)


def _experts(name: str, place: Place) -> Check:
    """Products of experts, of which two get no rows."""
    counts = torch.tensor([0, 40, 3, 0, 85])

    def product(device: torch.device, dtype: torch.dtype) -> Tensors:
        x, weight = (_drawn(shape, 4).to(device, dtype).requires_grad_() for shape in ((128, 64), (5, 96, 64)))
        y = grouped_matmul(x, weight, counts.to(device))
        y.backward(_drawn(tuple(y.shape), 5).to(y))
        assert x.grad is not None
        assert weight.grad is not None
        return y.detach(), x.grad, weight.grad

    exact = product(CPU, torch.float64)
    return _no_worse(name, product(device_of(place), torch.bfloat16), product(CPU, torch.bfloat16), exact)


def _fp8(place: Place) -> Iterator[Check]:
    """Products of codes by a kernel, beside the dequantized operands' product."""
    device = device_of(place)
    for name, recipe in RECIPES.items():
        if recipe.name == "delayed" or not has_kernel(recipe, device, torch.bfloat16):
            continue
        results = []
        for kernel in (True, False):
            product = LowPrecision(recipe)
            product.kernel = kernel
            x, weight = (_drawn(shape, 6).to(device, torch.bfloat16) for shape in ((256, 512), (384, 512)))
            results.append(product.compute(x, {"weight": weight}))
        ours, emulated = (result.double() for result in results)
        allowed = torch.finfo(torch.bfloat16).eps * emulated.abs().max().item()
        yield within(f"kernel in fp8, {name}", (ours - emulated).abs().max().item(), allowed)


def _bits(place: Place) -> Iterator[Check]:
    """Codes and random bits, which have the CPU's bits."""
    values, numbers = _drawn((64, 256), 7).float(), torch.arange(64)

    def codes(device: torch.device) -> dict[str, Any]:
        here = values.to(device)
        bits = drawn_bits(hash_key(0, "layer", "dropout"), numbers.to(device), 0, 256)
        return {
            "NF4": torch.cat([part.flatten().float() for part in encode_nf4(here)]),
            "int8": torch.cat([part.flatten().float() for part in encode_int8(here)]),
            "dropout's hash": bits,
            "stochastic rounding": round_at_random(here * 1.001, bits),
        }

    expected = codes(CPU)
    for name, ours in codes(device_of(place)).items():
        wrong = int((ours.cpu() != expected[name]).sum())
        yield Check(f"bits of {name}", wrong == 0, f"{wrong} of {ours.numel()} differ from the CPU's")


def _adamw(name: str, place: Place) -> Check:
    """Three steps of the fused optimizer beside the CPU's in fp64."""

    def weights(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        weight = torch.nn.Parameter(_drawn((64, 64), 8).to(device, dtype))
        optimizer = ShardedAdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for step in range(3):
            weight.grad = _drawn((64, 64), 10 + step).to(weight)
            optimizer.step()
        return weight.detach().double().cpu()

    apart = weights(device_of(place), torch.float32) - weights(CPU, torch.float64)
    return within(name, apart.abs().max().item(), 1e-6)
