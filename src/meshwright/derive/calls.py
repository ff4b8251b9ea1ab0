"""Calls of modules, recorded once and replayed: on the module itself, changed copies, or parts of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.torch_internals import TorchDispatchMode


class UnsplitError(Exception):
    """A module cannot be split so; the message is a reason."""


Key = int | str
"""An argument: its position, or its name."""


@dataclass
class RecordedCall:
    """A module's arguments in a forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: frozenset[Key]
    """The arguments that depend on parameters."""
    buried: bool
    """Whether a tensor inside a tuple, list or dict depends on parameters."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "RecordedCall":
        """A copy of the arguments of a call in progress."""
        items = [*enumerate(args), *kwargs.items()]
        direct = {key for key, value in items if isinstance(value, torch.Tensor) and value.requires_grad}
        nested = any(
            tensor.requires_grad
            for _, value in items
            if not isinstance(value, torch.Tensor)
            for tensor in tensors(value)
        )
        return cls(copied(args), copied(kwargs), frozenset(direct), nested)

    def on(self, module: nn.Module) -> tuple[torch.Tensor, dict[Key, torch.Tensor]]:
        """The first float tensor of the module's output, and the differentiable arguments, which are leaves."""
        args, kwargs = list(copied(self.args)), copied(self.kwargs)
        leaves: dict[Key, torch.Tensor] = {}
        for key in self.differentiable:
            holder: Any = kwargs if isinstance(key, str) else args
            leaves[key] = holder[key] = holder[key].requires_grad_()
        return first_float(module(*args, **kwargs)), leaves


def copied(value: Any) -> Any:
    """The value with copies of its tensors, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(one) for key, one in value.items()}
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)


def first_float(output: Any) -> torch.Tensor:
    """The first float tensor of a module's output."""
    first = next((tensor for tensor in tensors(output) if tensor.is_floating_point()), None)
    if first is None:
        raise UnsplitError("it returns no hidden states")
    return first


def record(run: Callable[[], object], modules: dict[tuple[int, str], nn.Module]) -> dict[tuple[int, str], RecordedCall]:
    """The first call of each of these modules while `run` runs."""
    calls: dict[tuple[int, str], RecordedCall] = {}
    handles = []
    for key, module in modules.items():

        def keep(_: nn.Module, args: Any, kwargs: Any, key: tuple[int, str] = key) -> None:
            calls.setdefault(key, RecordedCall.of(args, kwargs))

        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Float32Seen(TorchDispatchMode):
    """Notes whether an operation makes a float32 tensor."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= any(tensor.dtype == torch.float32 and tensor.dim() > 1 for tensor in tensors(result))
        return result


def rounds_in_float32(run: Callable[[], object]) -> bool:
    """Whether a computation in float64 passes through float32."""
    with _Float32Seen() as mode, torch.no_grad():
        run()
    return mode.seen


def gradients(
    output: torch.Tensor, direction: torch.Tensor, inputs: Mapping[Any, torch.Tensor]
) -> dict[Any, torch.Tensor]:
    """The gradients of sum(output * direction), without those that are absent or zero everywhere."""
    if not output.requires_grad:
        return {}
    computed = torch.autograd.grad((output * direction).sum(), list(inputs.values()), allow_unused=True)
    return {
        key: gradient
        for key, gradient in zip(inputs, computed, strict=True)
        if gradient is not None and bool(gradient.any())
    }


def direction_like(output: torch.Tensor) -> torch.Tensor:
    """A fixed random direction."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


NOISE = 1e-12
"""Size of a gradient that is all rounding, such as that of keys' biases, relative to the largest."""


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float, largest: float = 0.0) -> bool:
    """Whether tensors differ by at most `tolerance` of the second's norm, or by rounding of a tensor of norm
    `largest`."""
    room = max(1e-30, NOISE * largest)
    return left.shape == right.shape and bool((left - right).norm() <= tolerance * right.norm() + room)
