"""Backward passes in two parts: the gradients of linear layers' weights are deferred.

Zero-bubble schedules compute them while a rank would be idle (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
Only the products for linear layers' weight gradients are deferred; everything else, recomputation included, runs at
once. Any kind of product can be deferred, because its two gradients are separate functions (`models/linear.py`).

Shapes: M rows, D in, N out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.models.linear import Kept, Linear, Product
from meshwright.models.slots import Op, OpPosition, Weights


class DeferredInputs(NamedTuple):
    """The inputs of one linear layer's deferred weight gradient."""

    product: Product
    weights: Weights
    kept: Kept
    grad: torch.Tensor


class WeightGradients:
    """Collects a backward pass's deferred weight gradients until they are taken and added."""

    def __init__(self, model: nn.Module) -> None:
        """Make every linear layer of `model` with a trained matrix defer its gradient; adapters' gradients are not
        deferred."""
        self._waiting: list[DeferredInputs] = []
        for module in model.modules():
            if isinstance(module, Linear) and module.get_parameter(module.product.names[0]).requires_grad:
                module.put(Deferred(self._waiting.append))

    def take(self) -> list[DeferredInputs]:
        """The deferred gradients since the last call."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting


@torch.no_grad()
def add_weight_gradients(waiting: list[DeferredInputs]) -> None:
    """Add the deferred gradients to the weights' and biases' gradients."""
    for product, weights, kept, grad in waiting:
        weight, bias_N = weights[product.names[0]], weights.get("bias")
        if weight is not None and weight.requires_grad:
            torch.autograd.backward(weight, product.weight_gradient_of(kept, grad, weights))
        if bias_N is not None and bias_N.requires_grad:
            torch.autograd.backward(bias_N, grad.flatten(0, -2).sum(0))


class Deferred(Op):
    """The product, except the gradients of its weight and bias, which are passed to `leave`."""

    place = OpPosition.DEFERRED

    def __init__(self, leave: Callable[[DeferredInputs], None]) -> None:
        self.leave = leave

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        product = self.inner
        assert isinstance(product, Product)
        if not torch.is_grad_enabled():
            return product.forward(x, weights)
        weights = product.noted(weights)
        trained = any(tensor is not None and tensor.requires_grad for tensor in weights.values())
        return _InputGradientAlone.apply(x, x.new_zeros((), requires_grad=trained), weights, product, self.leave)

    def __repr__(self) -> str:
        return "weight gradient deferred"


class _InputGradientAlone(torch.autograd.Function):
    """A product whose backward pass computes only the gradient of its input.

    A dict hides the weights from autograd, so that autograd neither waits for their gradients nor frees their graph.
    `anchor` keeps the backward pass in the graph even if the input needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, weights: Weights, product: Product, leave: Any):
        y, kept = product.compute_keeping(x, weights)
        ctx.save_for_backward(*kept)
        ctx.weights, ctx.product, ctx.leave = weights, product, leave
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad,) = grad_outputs
        ctx.leave(DeferredInputs(ctx.product, ctx.weights, ctx.saved_tensors, grad))
        grad_x = ctx.product.input_gradient(grad, ctx.weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None
