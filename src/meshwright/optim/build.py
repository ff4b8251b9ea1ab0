"""The choice of optimizer for each parameter."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from meshwright.optim.adamw import AdamWBf16, ShardedAdamW
from meshwright.optim.adamw_8bit import AdamW8bit
from meshwright.optim.bf16 import Bf16
from meshwright.optim.muon import Muon
from meshwright.optim.paged_adamw import PagedAdamW
from meshwright.optim.parameterwise import Parameterwise
from meshwright.optim.plugged import Plugged
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import Parameter
from meshwright.spec.plugins import load_plugin
from meshwright.spec.precision import BF16
from meshwright.spec.training import OptimizerSpec

Rows = tuple[Parameter, ...]
"""Trained rows of the parameter table on this rank."""
Builder = Callable[[OptimizerSpec, Rows, Mapping[str, torch.Tensor]], list[torch.optim.Optimizer]]
"""(settings, rows, name -> tensor) -> optimizers; together they have every row's tensor exactly once."""


class Optimizers:
    """The optimizers of one run, driven together; every parameter belongs to exactly one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Raises `UserError` if an optimizer does not define its initial state."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Parameterwise | Plugged | ShardedAdamW):
                raise UserError(
                    f"optimizer {type(optimizer).__name__} does not define its initial state, so checkpoints cannot "
                    "be loaded into it; make it a Parameterwise (optim/parameterwise.py)"
                )
        self.optimizers = optimizers
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self._owner = {
            id(parameter): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @classmethod
    def joined(cls, parts: Iterable["Optimizers"]) -> "Optimizers":
        """Several optimizers as one; their learning rates must still be at their peaks."""
        return cls([optimizer for part in parts for optimizer in part.optimizers])

    def check_layout(self, layout: LayoutSpec) -> None:
        """Raise `UserError` if a user's optimizer cannot be sharded as the layout requires."""
        splits = layout.world_size > layout.dp_replicate
        for optimizer in self.optimizers:
            if splits and isinstance(optimizer, Plugged) and optimizer.elementwise is None:
                raise UserError(
                    f"training.optimizer.name={optimizer.name} does not set elementwise, and {layout.strategy} "
                    "splits the model over ranks; set elementwise = True in its class if it updates every "
                    "element independently, elementwise = False if it updates every tensor independently (it then gets "
                    "whole tensors), or train with layout.dp_replicate alone"
                )

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def step(self) -> None:
        """Update every parameter once."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def known_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors that a parameter already has."""
        state = self._owner[id(parameter)].state.get(parameter, {})
        return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of one parameter; zeros before the first step."""
        optimizer = self._owner[id(parameter)]
        if isinstance(optimizer, Plugged):
            return optimizer.state_of(parameter)
        if not optimizer.state[parameter]:
            assert isinstance(optimizer, Parameterwise | ShardedAdamW)
            optimizer.state[parameter] = optimizer.fresh_state(parameter)
        return optimizer.state[parameter]


def build_optimizers(
    spec: OptimizerSpec,
    table: Iterable[Parameter],
    parameters: Mapping[str, torch.Tensor],
    build: Builder | None = None,
    *,
    seed: int = 0,
) -> Optimizers:
    """The optimizers for `parameters` (name -> tensor as stored on this rank, plain or DTensor).

    Args:
        table: the trained rows.
        build: the builder, instead of `OPTIMIZERS[spec.name]`.
        seed: of stochastic rounding.
    """
    rows = tuple(table)
    optimizers = (build or OPTIMIZERS.get(spec.name, _plugged))(spec, rows, parameters)
    names = {id(parameters[row.name]): row.name for row in rows}
    bf16 = Bf16(rounding=spec.rounding, moments=spec.state_dtype == BF16.name, seed=seed, names=names)
    for optimizer in optimizers:
        if isinstance(optimizer, Parameterwise):
            optimizer.bf16 = bf16
    return Optimizers(optimizers)


def decayed_groups(spec: OptimizerSpec, rows: Rows, parameters: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay; only tensors with two dims decay, never norms and biases."""
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for row in rows:
        decay = spec.weight_decay if len(row.dims) >= 2 and row.dims[-1] != "bias" else 0.0
        groups.setdefault((spec.lr * row.lr_ratio, decay), []).append(parameters[row.name])
    return [{"params": tensors, "lr": lr, "weight_decay": decay} for (lr, decay), tensors in groups.items()]


def _adamw(make: Callable[..., torch.optim.Optimizer]) -> Builder:
    """A builder that gives all parameters to one kind of AdamW."""

    def build(spec: OptimizerSpec, rows: Rows, parameters: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
        groups = decayed_groups(spec, rows, parameters)
        return [make(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)] if groups else []

    return build


def _plain_adamw(
    spec: OptimizerSpec, rows: Rows, parameters: Mapping[str, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """AdamW by torch's fused kernel, if nothing is stored in bf16."""
    narrow = spec.state_dtype == BF16.name or any(parameters[row.name].dtype == torch.bfloat16 for row in rows)
    return _adamw(AdamWBf16 if narrow else ShardedAdamW)(spec, rows, parameters)


def _muon(spec: OptimizerSpec, rows: Rows, parameters: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Muon updates the hidden matrices; AdamW updates embeddings, head, adapters, vectors and experts. Gathering all
    experts of a layer for Muon's iteration would dominate the memory of a step."""
    hidden = [row for row in rows if len(row.dims) == 2 and not {"vocab", "positions", "rank"} & set(row.dims)]
    names = {row.name for row in hidden}
    others = tuple(row for row in rows if row.name not in names)
    optimizers = OPTIMIZERS["adamw"](spec, others, parameters)
    if hidden:
        matrices = [parameters[row.name] for row in hidden]
        optimizers.append(Muon(matrices, lr=spec.muon_lr, momentum=spec.muon_momentum, weight_decay=spec.weight_decay))
    return optimizers


def _plugged(spec: OptimizerSpec, rows: Rows, parameters: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """A plug-in, constructed with the peak learning rate and its options. A resolved recipe has every setting, so
    weight decay counts as given if it differs from the default."""
    settings = {"lr": spec.lr, **spec.options}
    if spec.weight_decay != OptimizerSpec.model_fields["weight_decay"].default:
        settings["weight_decay"] = spec.weight_decay
    groups = decayed_groups(spec, rows, parameters)
    return [Plugged(load_plugin("optimizers", spec.name), groups, settings, spec.name)] if groups else []


OPTIMIZERS: dict[str, Builder] = {
    "adamw": _plain_adamw,
    "adamw_8bit": _adamw(AdamW8bit),
    "paged_adamw": _adamw(PagedAdamW),
    "muon": _muon,
}
"""Values of `training.optimizer.name` that ship; other names are plug-ins."""
