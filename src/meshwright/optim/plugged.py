"""A user's optimizer in a run: any `torch.optim.Optimizer`; it gets plain tensors under every layout.

The class attribute `elementwise` states how it can be sharded:

    elementwise = True    each number is updated from its own history alone: it updates a rank's shards
    elementwise = False   each tensor is updated by itself: it gets one whole tensor at a time; the rank keeps its shard

Without the attribute, an update may depend on several tensors, so every rank must hold all of them whole.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.optim.shards import local, part_like, whole
from meshwright.spec.errors import UserError

ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""The elementwise optimizers of `torch.optim`."""

Factory = Callable[..., torch.optim.Optimizer]
"""(parameter groups with lr and weight_decay; lr, further settings by keyword) -> the optimizer."""

STAND_IN = (3, 5, 7, 11)
"""Shape of the tensor for trial steps: no two dims are equal."""


class Plugged(torch.optim.Optimizer):
    """A user's optimizer with the interface of ours: parameters, gradients and state as sharded on this rank."""

    def __init__(self, make: Factory, groups: list[dict[str, Any]], settings: Mapping[str, Any], name: str) -> None:
        """
        Args:
            make: called with groups of plain tensors and the settings.
            groups: parameter groups, each with `lr` and `weight_decay`.
            settings: keyword arguments; `weight_decay` only if the recipe sets one.
            name: its name in the recipe.

        Raises:
            UserError: it cannot be constructed with these, or checkpoints could not save its state.
        """
        super().__init__(groups, {})
        self.name, self._make, self._settings = name, make, dict(settings)
        self._leaves = {
            parameter: nn.Parameter(local(parameter).detach())
            for group in self.param_groups
            for parameter in group["params"]
        }
        leaves = [[self._leaves[parameter] for parameter in group["params"]] for group in self.param_groups]
        self.theirs = self._made([{**group, "params": own} for group, own in zip(groups, leaves, strict=True)])
        for ours, group in zip(self.param_groups, self.theirs.param_groups, strict=True):
            ours |= {key: value for key, value in group.items() if key != "params"}
        of_torch = type(self.theirs).__module__.startswith("torch.optim") and type(self.theirs).__name__ in ELEMENTWISE
        self.elementwise: bool | None = getattr(self.theirs, "elementwise", of_torch or None)
        """The optimizer's own attribute; None if it has none."""
        self._shaped = {dims: self._shaped_like(dims) for dims in {leaf.dim() for leaf in self._leaves.values()}}
        for parameter, leaf in self._leaves.items():
            begun = self._tensors(self.theirs.state.pop(leaf, {}))
            if begun and self.elementwise is False:
                raise UserError(
                    f"training.optimizer.name={name} creates state before its first step, when only shards exist; "
                    "create it in the first step, or set elementwise = True if it updates elements independently"
                )
            for key, tensor in begun.items():
                self._keep_state(parameter, key, tensor)

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        where, settings = f"training.optimizer.name={self.name}", dict(self._settings)
        decay = settings.pop("weight_decay", 0.0)
        try:
            made = self._make(groups, **settings)
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} cannot be constructed with parameter groups and {settings}: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(f"{where} returns a {type(made).__name__}, which is not a torch.optim.Optimizer")
        if decay and "weight_decay" not in made.defaults:
            raise UserError(f"training.optimizer.weight_decay={decay:g}: {self.name} has no weight_decay; set it to 0")
        closure = inspect.signature(type(made).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UserError(f"{where} needs a closure in its step, which is not supported")
        return made

    def _tried(self, shape: tuple[int, ...], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a plain tensor of this shape after one step, by name."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((2, *shape), generator=generator).to(like)
        stand_in = nn.Parameter(noise[0])
        stand_in.grad = noise[1]
        made = self._made([{**self.param_groups[0], "params": [stand_in]}])
        before = _kept_elsewhere(made)
        with torch.no_grad():
            made.step()
        for (where, key), value in _kept_elsewhere(made).items():
            if value != before.get((where, key)):
                raise UserError(
                    f"training.optimizer.name={self.name} keeps {key!r} in {where}, which checkpoints do not save; "
                    "make it a tensor in every parameter's state, such as state[p]['step'] = torch.tensor(0.0)"
                )
        return self._tensors(made.state[stand_in])

    def _shaped_like(self, dims: int) -> dict[str, bool]:
        """Name of each state of a parameter with `dims` dims -> whether it has the parameter's shape."""
        like = next(leaf for leaf in self._leaves.values() if leaf.dim() == dims)
        shape = STAND_IN[:dims]
        states = self._tried(shape, like)
        odd = [key for key, tensor in states.items() if tensor.shape != shape and tensor.numel() != 1]
        if odd and self.elementwise:
            raise UserError(
                f"training.optimizer.name={self.name} has elementwise = True, but its state {odd[0]!r} has another "
                "shape than the parameter; set elementwise = False to get whole tensors"
            )
        return {key: tensor.shape == shape for key, tensor in states.items()}

    def _tensors(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) and value is not None:
                raise UserError(
                    f"training.optimizer.name={self.name}: its state {key!r} is {type(value).__name__}, but "
                    "checkpoints save only tensors; make it one, such as torch.tensor(0.0)"
                )
        return {key: value for key, value in state.items() if value is not None}

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter, sharded like the parameter; zeros before the first step."""
        if not self.state[parameter]:
            like = self._leaves[parameter]
            shape = STAND_IN[: like.dim()] if self.elementwise else tuple(parameter.shape)
            shaped = self._shaped[like.dim()]
            self.state[parameter] = {
                key: torch.zeros_like(parameter, dtype=tensor.dtype) if shaped[key] else torch.zeros_like(tensor)
                for key, tensor in self._tried(shape, like).items()
            }
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Collective if tensors are gathered."""
        assert closure is None
        for ours, group in zip(self.param_groups, self.theirs.param_groups, strict=True):
            group |= {key: value for key, value in ours.items() if key != "params"}
        if self.elementwise is not False:
            self._step_lent([parameter for parameter in self._leaves if parameter.grad is not None], local)
            return
        kept = [group["params"] for group in self.theirs.param_groups]
        for group in self.theirs.param_groups:
            group["params"] = []
        for ours, group in zip(self.param_groups, self.theirs.param_groups, strict=True):
            for parameter in ours["params"]:
                if parameter.grad is not None:
                    group["params"] = [self._leaves[parameter]]
                    self._step_lent([parameter], whole)
            group["params"] = []
        for group, leaves in zip(self.theirs.param_groups, kept, strict=True):
            group["params"] = leaves

    def _step_lent(self, parameters: list[torch.Tensor], lend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Update parameters as the plain tensors that `lend` returns."""
        for parameter in parameters:
            leaf = self._leaves[parameter]
            leaf.data = lend(parameter.detach())
            assert parameter.grad is not None
            leaf.grad = lend(parameter.grad)
            self.theirs.state[leaf] = {key: lend(tensor) for key, tensor in self.state[parameter].items()}
        self.theirs.step()
        for parameter in parameters:
            leaf = self._leaves[parameter]
            _keep(leaf.detach(), parameter)
            states = self._tensors(self.theirs.state.pop(leaf))
            if late := states.keys() - self._shaped[leaf.dim()].keys():
                raise UserError(
                    f"training.optimizer.name={self.name}: its state {min(late)!r} is created after the first step, so "
                    "checkpoints would miss it; create it in the first"
                )
            for key, tensor in states.items():
                self._keep_state(parameter, key, tensor)
            leaf.data, leaf.grad = leaf.new_empty(0), None

    def _keep_state(self, parameter: torch.Tensor, key: str, tensor: torch.Tensor) -> None:
        state = self.state[parameter]
        if not isinstance(parameter, DTensor) or not self._shaped[parameter.dim()][key]:
            state[key] = tensor
            return
        if key not in state:
            state[key] = torch.zeros_like(parameter, dtype=tensor.dtype)
        _keep(tensor, state[key])


def _kept_elsewhere(optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], float]:
    """(where, name) -> every number that an optimizer stores outside the parameters' state."""
    places = {"its parameter groups": optimizer.param_groups[0], "an attribute": vars(optimizer)}
    return {
        (where, key): float(value)
        for where, kept in places.items()
        for key, value in kept.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not isinstance(value, bool)
    }


def _keep(tensor: torch.Tensor, home: torch.Tensor) -> None:
    """Write a lent tensor back: a whole tensor, or this rank's shard, which may already be in place."""
    part, here = tensor, local(home)
    if tensor.shape != here.shape:
        part = part_like(tensor, home)
    if part.data_ptr() != here.data_ptr():
        here.copy_(part)
