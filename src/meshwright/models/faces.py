"""Faces: modules of transformers with slots, so that several processes can share one.

A face is an object of a class made from `Face` and transformers' class, with the module's own parameters and parts. It
reads its parameters through a view (`slots.py`), also where transformers' code names them (`self.sinks`), and has slots
for its arguments and its output. `put_faces` fills these by a `SplitModule`, which `derive/` derives.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.models.slots import Op, OpPosition, View, Viewed, Weights
from meshwright.spec.foreign import SplitModule

Change = Callable[[torch.Tensor], torch.Tensor]


class Sharing(Protocol):
    """What those that compute parts of one module do together."""

    size: int
    rank: int

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which all have; backward, the sum of all gradients."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all parts; backward, the gradient, which all have."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All parts along the last dim; backward, the sum of all gradients of this part."""
        ...


class Face(Viewed):
    """A module of transformers with slots; its own class comes next in the method resolution order."""

    entering: tuple[int | str, ...] = ()
    """The arguments that `enter` changes, by position or name."""
    enter: Change | None = None
    leave: Change | None = None
    """Changes the output, or its first tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' forward pass."""
        if self.enter is not None:
            given = list(args)
            for key in self.entering:
                holder: Any = kwargs if isinstance(key, str) else given
                holder[key] = self.enter(holder[key])
            args = tuple(given)
        theirs: Any = super()
        output = theirs.forward(*args, **kwargs)
        return output if self.leave is None else changed_first(output, self.leave)

    def extra_repr(self) -> str:
        """The contents of the slots."""
        slots = [f"{self.entering} {self.enter}" if self.enter else "", f"output {self.leave}" if self.leave else ""]
        return ", ".join(filter(None, (super().extra_repr(), *slots)))


class NormFace(Face):
    """A norm over a dim whose parts are spread: it is computed over all parts, and this part is kept."""

    sharing: Sharing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., this part of D] to the same."""
        width = args[0].shape[-1]

        def whole(value: Any) -> Any:
            spread = isinstance(value, torch.Tensor) and value.shape[-1:] == (width,)
            return self.sharing.gather(value) if spread else value

        output = super().forward(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
        return output[..., self.sharing.rank * width : (self.sharing.rank + 1) * width]


class SummedOutput(Op):
    """A linear layer of ours with a part of the inputs here: the products are summed. A view gives the bias once."""

    place = OpPosition.SPLIT

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., this part of D] to [..., N]."""
        return self.sharing.sum(self.inner.forward(x, weights))

    def __repr__(self) -> str:
        return f"summed over {self.sharing}"


class EnteredInput(Op):
    """A linear layer of ours with a part of the outputs here: the gradients of its input are summed."""

    place = OpPosition.SPLIT

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[..., D] to [..., this part of N]."""
        return self.inner.forward(self.sharing.enter(x), weights)

    def __repr__(self) -> str:
        return f"input of {self.sharing}"


def changed_first(output: Any, change: Change) -> Any:
    """A module's output with its first tensor changed."""
    if isinstance(output, torch.Tensor):
        return change(output)
    return (changed_first(output[0], change), *output[1:])


def with_face(
    face: type[nn.Module],
    module: nn.Module,
    named: Iterable[str] = (),
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A module of a class with `face` before `module`'s own, with its parameters and parts under the same names; made
    as `copy.copy` makes one. Parameters `named` are read through the view wherever they are named; `changed`:
    attributes with other values."""
    faced = _faced(face, type(module), tuple(named))
    made = faced.__new__(faced)
    made.__setstate__({**module.__dict__, **changed})
    return made


@functools.cache
def _faced(face: type[nn.Module], theirs: type[nn.Module], named: tuple[str, ...]) -> type[nn.Module]:
    return type(f"Foreign{theirs.__name__}", (face, theirs), {name: _viewed(name) for name in named})


def _viewed(name: str) -> property:
    """FSDP2 also reads and replaces parameters between steps, by the same names."""

    def read(module: Face) -> Any:
        return module.view.read(module)[name] if module.view.readable(module) else module._parameters[name]

    return property(read)


def put_faces(module: nn.Module, split: SplitModule, sharing: Sharing, views: Mapping[str, View]) -> nn.Module:
    """`module`, whose parameters are this part's, with faces inside; returns what takes its place.

    `views`: of modules within, by their paths; modules that are `Viewed` already keep their class and get them too.
    """
    numbers: dict[str, list[tuple[str, int, int]]] = {}
    for path, name, multiplier, divisor in split.attributes:
        numbers.setdefault(path, []).append((name, multiplier, divisor))
    entered: dict[str, tuple[int | str, ...]] = {}
    for path, key in split.entered:
        entered[path] = (*entered.get(path, ()), key)
    paths = views.keys() | numbers.keys() | entered.keys() | {"", split.summed, *split.gathered}
    for path in sorted(paths, key=lambda path: (not path, -path.count("."))):
        inner = module.get_submodule(path)
        norm = path in split.gathered
        if not isinstance(inner, Viewed) or norm:
            smaller = _smaller(inner, numbers.get(path, ()))
            inner = with_face(NormFace if norm else Face, inner, inner._parameters, smaller)
        if path in views:
            inner.view = views[path]
        if isinstance(inner, NormFace):
            inner.sharing = sharing
        if path == split.summed:
            _sum(inner, sharing)
        if path in entered:
            _enter(inner, entered[path], sharing)
        if path == "":
            module = inner
        else:
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).register_module(name, inner)
    return module


def _sum(module: nn.Module, sharing: Sharing) -> None:
    """Sum a module's output: a layer of ours by its op, a face by its slot."""
    if isinstance(module, Face):
        module.leave = sharing.sum
    else:
        layer: Any = module
        layer.put(SummedOutput(sharing))


def _enter(module: nn.Module, keys: tuple[int | str, ...], sharing: Sharing) -> None:
    """Sum the gradients of a module's inputs."""
    if isinstance(module, Face):
        module.entering, module.enter = keys, sharing.enter
    else:
        layer: Any = module
        layer.put(EnteredInput(sharing))


def _smaller(module: nn.Module, numbers: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """The attributes of a part: smaller numbers, those of its config in a copy."""
    attributes: dict[str, Any] = {}
    for name, multiplier, divisor in numbers:
        owner, _, last = name.rpartition(".")
        holder: Any = module.config if owner else module
        number = max(1, getattr(holder, last) * multiplier // divisor)
        if owner:
            attributes.setdefault("config", copy.copy(holder)).update({last: number})
        else:
            attributes[last] = number
    return attributes
