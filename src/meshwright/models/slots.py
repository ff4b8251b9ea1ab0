"""The slots of a layer: their ops, the order of the ops, and how a layer reads its parameters.

A layer with parameters computes through a stack of ops, the innermost first:

| place    | op                                                    | filled by                       |
|----------|-------------------------------------------------------|---------------------------------|
| PRODUCT  | the product with the weight: plain, NF4, int8         | the layer, `finetune/apply.py`  |
| DEFERRED | the gradient of the product's weight waits            | `parallel/weight_gradients.py`  |
| ADAPTER  | LoRA, DoRA, IA3                                       | `finetune/apply.py`             |
| SPLIT    | tensor parallelism: the sum over ranks, the vocabulary | `parallel/tensor.py`           |

Each place has at most one op. A strategy changes a layer by putting an op in its place; it never replaces a method or a
class. `print(model)` shows the stack. Parameters stay registered in the layer itself, so their names never change.
"""

from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

Weights = dict[str, Any]
"""A layer's parameters by name, as its ops use them: tensors, or None if a parameter is absent."""


class OpPosition(IntEnum):
    """The position of an op in a layer's stack, from the inside out."""

    PRODUCT = 0
    DEFERRED = 1
    ADAPTER = 2
    SPLIT = 3


class View:
    """How a layer reads its parameters: unchanged. A strategy whose ranks hold parts of them gives the layer another
    view."""

    def read(self, module: nn.Module) -> Weights:
        """The parameters of `module` by name. Read once per forward pass, because FSDP2 swaps them around it."""
        return dict(module._parameters)

    def readable(self, module: nn.Module) -> bool:
        """Whether the parameters can be read: within a forward pass."""
        return True

    def __repr__(self) -> str:
        return ""


class Viewed(nn.Module):
    """A module that reads its parameters through a view."""

    view: View = View()

    def extra_repr(self) -> str:
        """The module's details in `print(model)`."""
        return ", ".join(filter(None, (super().extra_repr(), repr(self.view))))


class Op:
    """One step of a layer's computation."""

    place: ClassVar[OpPosition]
    inner: "Op"
    """The op within; `Layer.put` sets it."""

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The layer's output for `x`, computed with the ops within."""
        raise NotImplementedError

    def merged(self, weights: Weights) -> Weights:
        """The parameters of an equivalent plain layer."""
        return self.inner.merged(weights)


OpT = TypeVar("OpT", bound=Op)


class Layer(Viewed):
    """A module that computes through a stack of ops."""

    ops: tuple[Op, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output of the outermost op."""
        return self.ops[-1].forward(input, self.view.read(self))

    def put(self, op: Op) -> None:
        """Put an op in its place, replacing any existing one."""
        others = (other for other in self.ops if other.place != op.place)
        self.ops = tuple(sorted((*others, op), key=lambda op: op.place))
        for inner, outer in pairwise(self.ops):
            outer.inner = inner

    def find(self, kind: type[OpT]) -> OpT | None:
        """The op of this kind, if the layer has one."""
        return next((op for op in self.ops if isinstance(op, kind)), None)

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of an equivalent plain layer."""
        merged = self.ops[-1].merged(self.view.read(self))
        return {name: tensor for name, tensor in merged.items() if tensor is not None}

    def extra_repr(self) -> str:
        """Shapes and view, then the ops from the inside out."""
        return f"{super().extra_repr()}, ops: {' < '.join(map(repr, self.ops))}"


Entry = Callable[[torch.Tensor], torch.Tensor]
"""Applied to the input of several layers before they read it."""


def unreduced(tensor: torch.Tensor) -> torch.Tensor:
    """The default of slots that reduce a tensor over ranks: this rank has all that it is computed from."""
    return tensor


Compute = Callable[..., Any]
"""A forward pass."""

Wrapper = Callable[[Compute], Compute]
"""Wraps a forward pass without changing its result: recomputed, compiled or excluded from compilation."""


class Wrapped(nn.Module):
    """A module whose forward pass, `compute`, may be wrapped; the first wrapper is the innermost."""

    wrappers: tuple[Wrapper, ...] = ()
    run: Compute | None = None
    """`compute` in all its wrappers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`compute`, as the wrappers run it."""
        return self.compute(*args, **kwargs) if self.run is None else self.run(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass itself."""
        raise NotImplementedError

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap the forward pass with its current wrappers in `wrapper`."""
        self.wrappers = (*self.wrappers, wrapper)
        self.run = wrapper(self.compute if self.run is None else self.run)

    def extra_repr(self) -> str:
        """The wrappers, from the inside out."""
        wrappers = f"run: {' < '.join(map(repr, self.wrappers))}" if self.wrappers else ""
        return ", ".join(filter(None, (super().extra_repr(), wrappers)))
