"""The one place that splits a backward pass in two: the gradients of linear layers' weights are put off till later.

Zero-bubble schedules do them in ranks' waiting time (Qi et al., "Zero Bubble Pipeline Parallelism", 2024). Only the
products that make the weight gradients of linear layers wait; everything else is done at once, recomputation included.

Shapes: M rows, D in, N out.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from meshwright.models.cpu_kernels import matmul


class Product(NamedTuple):
    """What the gradient of one linear layer's weight is the product of."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    grad: torch.Tensor


class WeightGradients:
    """Collects the products that a backward pass puts off, until somebody takes them and later adds them up."""

    def __init__(self, model: nn.Module) -> None:
        """Make every linear layer of `model` that trains put its weight's gradient off."""
        self._products: list[Product] = []
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:  # a frozen one's adapter does not wait
                module.forward = functools.partial(self._forward, module, module.forward)  # type: ignore[method-assign]

    def take(self) -> list[Product]:
        """What backward passes have put off since the last call."""
        products, self._products = self._products, []
        return products

    def _put_off(self, product: Product) -> None:
        self._products.append(product)

    def _forward(
        self, module: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(x)
        # Read here, for other strategies put what a layer computes with in place for the forward pass only.
        weight_ND, bias_N = module.weight, module.bias
        trained = any(tensor is not None and tensor.requires_grad for tensor in (weight_ND, bias_N))
        anchor = x.new_zeros((), requires_grad=trained)
        y = _Linear.apply(x, anchor, (weight_ND, bias_N), forward, self._put_off)
        assert isinstance(y, torch.Tensor)
        return y


@torch.no_grad()
def add_weight_gradients(products: list[Product]) -> None:
    """Add the gradients that were put off to those of the weights and biases."""
    for weight_ND, bias_N, x, grad in products:
        grad_MN = grad.flatten(0, -2)
        if weight_ND.requires_grad:
            torch.autograd.backward(weight_ND, matmul(grad_MN.t(), x.flatten(0, -2)))
        if bias_N is not None and bias_N.requires_grad:
            torch.autograd.backward(bias_N, grad_MN.sum(0))


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input alone.

    Weight and bias are hidden from autograd in a tuple, so that it neither waits for their gradients nor takes what
    leads to them apart; `anchor` says that there is something to do even where the input needs no gradient.
    """

    @staticmethod
    def forward(ctx, x, anchor, hidden, forward, put_off):
        ctx.save_for_backward(x)
        ctx.hidden, ctx.put_off = hidden, put_off
        return forward(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,), (x,), (weight_ND, bias_N) = grad_outputs, ctx.saved_tensors, ctx.hidden
        ctx.put_off(Product(weight_ND, bias_N, x, grad))
        grad_x = matmul(grad.flatten(0, -2), weight_ND).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None
