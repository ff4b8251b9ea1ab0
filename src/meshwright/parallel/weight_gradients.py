"""Backward passes in two parts: the gradients of linear layers' weights wait for later.

Zero-bubble schedules compute them in ranks' waiting time (Qi et al., "Zero Bubble Pipeline Parallelism", 2024). Only
the products that make the weight gradients of linear layers wait; everything else is done at once, recomputation
included. Any kind of product can wait, because its two gradients are functions of their own (`models/linear.py`).

Shapes: M rows, D in, N out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.models.linear import Linear, Product
from meshwright.models.slots import Op, Place, Weights


class Waiting(NamedTuple):
    """What the gradient of one linear layer's weight will be computed from."""

    product: Product
    weights: Weights
    x: torch.Tensor
    grad: torch.Tensor


class WeightGradients:
    """Collects what a backward pass leaves for later, until somebody takes it and adds it up."""

    def __init__(self, model: nn.Module) -> None:
        """Make every linear layer of `model` whose matrix trains defer its gradient; adapters' do not wait."""
        self._waiting: list[Waiting] = []
        for module in model.modules():
            if isinstance(module, Linear) and module.get_parameter(module.product.names[0]).requires_grad:
                module.put(Deferred(self._waiting.append))

    def take(self) -> list[Waiting]:
        """What backward passes have left since the last call."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting


@torch.no_grad()
def add_weight_gradients(waiting: list[Waiting]) -> None:
    """Add the gradients that waited to those of the weights and biases."""
    for product, weights, x, grad in waiting:
        weight, bias_N = weights[product.names[0]], weights.get("bias")
        if weight is not None and weight.requires_grad:
            torch.autograd.backward(weight, product.weight_gradient(x, grad, weights))
        if bias_N is not None and bias_N.requires_grad:
            torch.autograd.backward(bias_N, grad.flatten(0, -2).sum(0))


class Deferred(Op):
    """The product, but for the gradients of its weight and bias, which are handed to `leave`."""

    place = Place.DEFERRED

    def __init__(self, leave: Callable[[Waiting], None]) -> None:
        self.leave = leave

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        product = self.inner
        assert isinstance(product, Product)
        if not torch.is_grad_enabled():
            return product.forward(x, weights)
        weights = product.noted(weights)
        trained = any(tensor is not None and tensor.requires_grad for tensor in weights.values())
        y = _InputGradientAlone.apply(x, x.new_zeros((), requires_grad=trained), weights, product, self.leave)
        assert isinstance(y, torch.Tensor)
        return y

    def __repr__(self) -> str:
        return "weight gradient deferred"


class _InputGradientAlone(torch.autograd.Function):
    """A product whose backward pass computes the gradient of its input alone.

    The weights are hidden from autograd in a dict, so that it neither waits for their gradients nor takes what leads to
    them apart; `anchor` says that there is something to do even where the input needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, weights: Weights, product: Product, leave: Any):
        ctx.save_for_backward(x)
        ctx.weights, ctx.product, ctx.leave = weights, product, leave
        return product.forward(x, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        ctx.leave(Waiting(ctx.product, ctx.weights, x, grad))
        grad_x = ctx.product.input_gradient(grad, ctx.weights).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None
