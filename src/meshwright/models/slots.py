"""The slots of a layer: what may stand in them, in which order, and how a layer reads its parameters.

A layer with parameters computes through a stack of ops, the innermost first:

| place    | op                                                    | filled by                       |
|----------|-------------------------------------------------------|---------------------------------|
| PRODUCT  | the product with the weight: plain, NF4, int8         | the layer, `finetune/apply.py`  |
| DEFERRED | the gradient of the product's weight waits            | `parallel/weight_gradients.py`  |
| ADAPTER  | LoRA, DoRA, IA3                                       | `finetune/apply.py`             |
| SPLIT    | tensor parallelism: the sum over ranks, the vocabulary | `parallel/tensor.py`           |

Each place has one op at most. Whoever changes a layer puts an op in its place; nobody replaces a method or a class.
`print(model)` shows the stack. Parameters stay registered in the layer itself, so their names never change.
"""

from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

Weights = dict[str, Any]
"""A layer's parameters by name, as its ops compute with them: tensors, or None where a parameter is left out."""


class Place(IntEnum):
    """Where an op stands in a layer's stack, from the inside out."""

    PRODUCT = 0
    DEFERRED = 1
    ADAPTER = 2
    SPLIT = 3


class View:
    """How a layer reads its parameters: as they are. A strategy whose ranks keep parts of them gives the layer another
    view."""

    def read(self, module: nn.Module) -> Weights:
        """The parameters of `module` by name. Read once per forward pass, because FSDP2 swaps them around it."""
        return dict(module._parameters)

    def __repr__(self) -> str:
        return ""


class Viewed(nn.Module):
    """A module that reads its parameters through a view."""

    view: View = View()

    def extra_repr(self) -> str:
        """What `print(model)` says of the module."""
        return ", ".join(filter(None, (super().extra_repr(), repr(self.view))))


class Op:
    """One step of what a layer computes."""

    place: ClassVar[Place]
    inner: "Op"
    """The op within; `Layer.put` sets it."""

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The layer's output for `x`, computed with the ops within."""
        raise NotImplementedError

    def merged(self, weights: Weights) -> Weights:
        """The parameters of a plain layer that computes the same."""
        return self.inner.merged(weights)


OpT = TypeVar("OpT", bound=Op)


class Layer(Viewed):
    """A module that computes through a stack of ops."""

    ops: tuple[Op, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """What the outermost op makes of `input`."""
        return self.ops[-1].forward(input, self.view.read(self))

    def put(self, op: Op) -> None:
        """Put an op in its place, instead of whatever stands there."""
        others = (other for other in self.ops if other.place != op.place)
        self.ops = tuple(sorted((*others, op), key=lambda op: op.place))
        for inner, outer in pairwise(self.ops):
            outer.inner = inner

    def find(self, kind: type[OpT]) -> OpT | None:
        """The op of this kind, if one stands here."""
        return next((op for op in self.ops if isinstance(op, kind)), None)

    def merged(self) -> dict[str, torch.Tensor]:
        """The parameters of a plain layer that computes the same."""
        merged = self.ops[-1].merged(self.view.read(self))
        return {name: tensor for name, tensor in merged.items() if tensor is not None}

    def extra_repr(self) -> str:
        """Shapes and view, then the ops from the inside out."""
        return f"{super().extra_repr()}, ops: {' < '.join(map(repr, self.ops))}"


Entry = Callable[[torch.Tensor], torch.Tensor]
"""What the input of several layers goes through before they read it."""

Compute = Callable[..., Any]
"""A forward pass."""

Wrapper = Callable[[Compute], Compute]
"""Makes of a forward pass one that computes the same in another way: recomputed, compiled or kept out of it."""


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
        """Put `wrapper` around everything that wraps the forward pass so far."""
        self.wrappers = (*self.wrappers, wrapper)
        self.run = wrapper(self.compute if self.run is None else self.run)

    def extra_repr(self) -> str:
        """The wrappers, from the inside out."""
        wrappers = f"run: {' < '.join(map(repr, self.wrappers))}" if self.wrappers else ""
        return ", ".join(filter(None, (super().extra_repr(), wrappers)))
