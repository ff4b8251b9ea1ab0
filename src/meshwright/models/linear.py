"""Linear layers: the product with a weight, with separate functions for its input and weight gradients.

A kind of product (plain, a quantized weight, low precision) is a class with three methods. The rest works with any
kind: adapters compute beside it, zero-bubble schedules defer its weight gradient, tensor parallelism sums it over
ranks.

Shapes: M rows, D in, N out.
"""

from typing import Any

import torch
from torch import nn

from meshwright.models.cpu_kernels import linear, matmul
from meshwright.models.slots import Layer, Op, OpPosition, Weights

Kept = tuple[torch.Tensor, ...]
"""The tensors that the forward pass saves of a product's input."""


class Product(Op):
    """`x W^T + b`, by three functions that need no autograd: `compute`, `input_gradient` and `weight_gradient`."""

    place = OpPosition.PRODUCT
    names: tuple[str, ...] = ("weight",)
    """The parameters that make up the matrix W, and the entries that `noted` adds. Only the first may train."""

    def noted(self, weights: Weights) -> Weights:
        """The parameters, and any state of the forward pass that the gradients need."""
        return weights

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]. Saves for the backward pass only the tensors that make up W, and, if W trains, the
        result of `compute_keeping`."""
        weights = self.noted(weights)
        matrix = (weights.get(name) for name in self.names)
        return _Apart.apply(x, weights.get("bias"), self, *matrix)

    def compute(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        raise NotImplementedError

    def input_gradient(self, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The gradient [..., D] of x, from the gradient of the output [..., N]."""
        raise NotImplementedError

    def weight_gradient(self, x: torch.Tensor, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The gradient [N, D] of W, from x [..., D] and the gradient of the output [..., N]."""
        raise NotImplementedError

    def compute_keeping(self, x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, Kept]:
        """`compute`, and the tensors that the gradient of W needs of x: x itself."""
        return self.compute(x, weights), (x,)

    def weight_gradient_of(self, kept: Kept, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """`weight_gradient`, from the tensors that `compute_keeping` saved."""
        (x,) = kept
        return self.weight_gradient(x, grad, weights)

    def merged(self, weights: Weights) -> Weights:
        """The layer's own weight and bias."""
        return {name: weights[name] for name in ("weight", "bias") if name in weights}


class Plain(Product):
    """The product in the dtype of its inputs."""

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Like `Product.forward`, but by torch's own autograd, which compilers can trace."""
        return linear(x, weights["weight"], weights.get("bias"))

    def compute(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., N]."""
        return self.forward(x, weights)

    def input_gradient(self, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., N] to [..., D]."""
        return matmul(grad.flatten(0, -2), weights["weight"]).view(*grad.shape[:-1], -1)

    def weight_gradient(self, x: torch.Tensor, grad: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[N, D]."""
        return matmul(grad.flatten(0, -2).t(), x.flatten(0, -2))

    def __repr__(self) -> str:
        return "plain"


class Linear(Layer, nn.Linear):
    """`nn.Linear` with slots: [..., D] to [..., N]. fp32 products on a CPU use oneDNN."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.ops = (Plain(),)

    @property
    def product(self) -> Product:
        """The innermost op."""
        product = self.ops[0]
        assert isinstance(product, Product)
        return product


def take_over(module: nn.Linear) -> Linear:
    """A `Linear` with the same parameter objects as `module`, so that ties and names stay."""
    with torch.device("meta"):
        ours = Linear(module.in_features, module.out_features, bias=False)
    for name, parameter in module._parameters.items():
        ours.register_parameter(name, parameter)
    return ours.train(module.training)


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes `nn.Linear`'s function; a subclass's own forward pass is tried on a few numbers."""
    cls = type(module)
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return isinstance(module, nn.Linear)
    try:
        probe: Any = cls(3, 2)
    except TypeError:  # a class with other arguments, such as a router, which is made for its model
        return False
    x_ND = torch.randn(4, 3)
    y = probe(x_ND)
    return isinstance(y, torch.Tensor) and torch.allclose(y, nn.Linear.forward(probe, x_ND))


class _Apart(torch.autograd.Function):
    """A product as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias_N: torch.Tensor | None, product: Product, *matrix: torch.Tensor):
        weights = {**dict(zip(product.names, matrix, strict=True)), "bias": bias_N}
        y, kept = product.compute_keeping(x, weights) if ctx.needs_input_grad[3] else (product.compute(x, weights), ())
        ctx.save_for_backward(*matrix, *kept)
        ctx.product = product
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad,), saved, product = grad_outputs, ctx.saved_tensors, ctx.product
        matrix, kept = saved[: len(product.names)], saved[len(product.names) :]
        weights = dict(zip(product.names, matrix, strict=True))
        need_x, need_bias, _, need_weight, *others = ctx.needs_input_grad
        return (
            product.input_gradient(grad, weights) if need_x else None,
            grad.flatten(0, -2).sum(0) if need_bias else None,
            None,
            product.weight_gradient_of(kept, grad, weights) if need_weight else None,
            *(None for _ in others),
        )
