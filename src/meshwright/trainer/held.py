"""A rank's memory at a point in time: bytes by kind, activations by layer, and the largest tensors by name."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from meshwright.devices import on_cpu, reserved_bytes
from meshwright.launch.memory import resident
from meshwright.torch_internals import (
    all_tensors,
    gathered_parameters,
    kept_by_recomputation,
    local_tensor,
    passing_tensors,
    saved_for_backward,
    tensors_in_flight,
)
from meshwright.trainer.setup import Trainer

WEIGHTS, GRADIENTS, OPTIMIZER, COMMUNICATION, ACTIVATIONS, TEMPORARIES, OTHER, PROCESS = KINDS = (
    "weights",
    "gradients",
    "master weights, moments",
    "communication",
    "activations",
    "logits and temporaries",
    "fragmentation and other",
    "the process itself",
)
OUTSIDE = "outside the layers"
"""The place of activations outside the layers: embeddings, last norm, head and loss."""


@dataclass
class HeldMemory:
    """A rank's memory at a moment."""

    kinds: dict[str, int]
    """Bytes by kind; empty if nothing was built yet."""
    layers: dict[str, int] = field(default_factory=dict)
    """Bytes of activations by layer."""
    largest: list[tuple[int, str, str]] = field(default_factory=list)
    """(bytes, name, kind) of the largest tensors."""


def held(trainer: Trainer, trace: TracebackType | None = None) -> HeldMemory:
    """This rank's memory now. `trace`: of an error; its frames name temporaries.

    The graph of a step in progress cannot be used afterwards.
    """
    count = _Count(trainer.device.type)
    for tensor in trainer.store.elsewhere:
        count.pass_over(tensor)
    for name, tensor in trainer.store.here():
        count.add(tensor, name, OPTIMIZER)
    for name, tensor in _weights(trainer):
        count.add(tensor, name, WEIGHTS)
    for name, tensor in _gradients(trainer):
        count.add(tensor, f"gradient of {name}", GRADIENTS)
    for name, module in trainer.model.named_modules():
        for tensor in tensors_in_flight(module):
            count.add(tensor, f"{name or 'the model'}, in flight", COMMUNICATION)
    everything = all_tensors()
    layers: Counter[str] = Counter()
    for layer, what, tensor in _activations(trainer.model, everything, count):
        layers[layer] += count.add(tensor, what, ACTIVATIONS)
    for name, tensor in _locals(trace):
        count.add(tensor, name, TEMPORARIES)
    for tensor in everything:
        count.add(tensor, "unnamed", TEMPORARIES)
    kinds = dict.fromkeys(KINDS, 0) | count.kinds
    if not on_cpu(trainer.device):
        total, own = reserved_bytes(trainer.device), 0
    else:
        total, own = resident(), trainer.process_bytes
    kinds[PROCESS] = own
    kinds[OTHER] = max(0, total - own - sum(count.kinds.values()))
    return HeldMemory(kinds, dict(layers), sorted(count.sizes, reverse=True))


class _Count:
    """Bytes of storages on a device, each counted once, under the first name given to it."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.kinds: Counter[str] = Counter()
        self.parameters: dict[int, str] = {}
        """Identity of a parameter's storage -> its name."""
        self._seen: set[int] = set()
        self.sizes: list[tuple[int, str, str]] = []
        self._kept: list[torch.UntypedStorage | torch.Tensor] = []  # held so that their ids are not reused

    def add(self, tensor: torch.Tensor, name: str, kind: str) -> int:
        """Count a tensor; returns its bytes, 0 if it is on another device or counted already."""
        here = local_tensor(tensor)
        if here.device.type != self.device_type or (
            type(here) is not torch.Tensor and not isinstance(here, nn.Parameter)
        ):
            return 0
        storage = _storage(here)
        if id(storage) in self._seen:
            return 0
        self._kept.append(storage)
        size = storage.nbytes if isinstance(storage, torch.Tensor) else storage.nbytes()
        self._seen.add(id(storage))
        if kind in (OPTIMIZER, WEIGHTS):
            self.parameters[id(storage)] = name
        self.kinds[kind] += size
        if size:
            shape = " x ".join(map(str, here.shape))
            self.sizes.append((size, f"{name} [{shape}, {str(here.dtype).removeprefix('torch.')}]", kind))
        return size

    def pass_over(self, tensor: torch.Tensor) -> None:
        """Never count a tensor."""
        storage = _storage(tensor)
        self._kept.append(storage)
        self._seen.add(id(storage))

    def parameter_of(self, tensor: torch.Tensor) -> str:
        """The name of the parameter that a tensor is, or is a view of; empty if none."""
        here = local_tensor(tensor)
        return self.parameters.get(id(_storage(here)), "") if here.device.type == self.device_type else ""


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | torch.Tensor:
    """The owner of a tensor's bytes: its storage, or the tensor in oneDNN's layout (weights packed for decoding)."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


def _weights(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    yield from trainer.model.named_parameters()
    yield from trainer.model.named_buffers()
    for name, module in trainer.model.named_modules():
        for full_name, tensor in gathered_parameters(module):
            yield full_name or name, tensor
        for tensor in passing_tensors(module)[0]:
            yield f"{name or 'embeddings and head'} gathered", tensor
    for tensor in trainer.train_step.passes.working_copies().get("weights", ()):
        yield "copy of weights", tensor


def _gradients(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    named = (*trainer.model.named_parameters(), *trainer.parameters.items())
    for name, tensor in named:
        if tensor.grad is not None:
            yield name, tensor.grad
    for name, module in trainer.model.named_modules():
        for full_name, tensor in gathered_parameters(module):
            if tensor.grad is not None:
                yield full_name or name, tensor.grad
        for tensor in passing_tensors(module)[1]:
            if tensor is not None:
                yield name or "embeddings and head", tensor
    for tensor in trainer.train_step.passes.working_copies().get("gradients", ()):
        yield "an earlier batch", tensor


def _activations(
    model: nn.Module, everything: list[torch.Tensor], count: _Count
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(layer, name, tensor) of each tensor saved for a backward pass.

    Operations run layer by layer: each belongs to the layer of the last parameter that was read before it.
    """
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    for module in model.modules():
        names |= {id(tensor): name for name, tensor in gathered_parameters(module)}
    layer, parts = OUTSIDE, {name for name, _ in model.named_children()}
    for saved in sorted(saved_for_backward(everything), key=lambda saved: saved.order):
        if saved.name.endswith("AccumulateGrad"):
            continue
        read = [names.get(id(leaf), "") for leaf in saved.leaves] + [count.parameter_of(kept) for kept in saved.tensors]
        parameter = next((name for name in read if name.partition(".")[0] in parts), "")
        layer = layer_of(parameter) if parameter else layer
        operation = re.sub(r"Backward\d*$", "", saved.name).strip("_")
        what = f"{parameter.rpartition('.')[0] or layer}, {operation}"
        yield from ((layer, what, tensor) for tensor in saved.tensors)
    modules = {id(module): name for name, module in model.named_modules()}
    for function, kept in kept_by_recomputation():
        name = modules.get(id(_owner(function)), "")
        yield from ((layer_of(name), f"{name or OUTSIDE}, kept to recompute", tensor) for tensor in kept)


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.attention.wq.weight`; `OUTSIDE` for parameters outside the layers."""
    match = re.match(r"layers\.\d+", name)
    return match[0] if match else OUTSIDE


def _owner(function: Any) -> object:
    """The module that a method belongs to, even if it is wrapped."""
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__self__", None)


def _locals(trace: TracebackType | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the variables of an error's frames, the innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), torch.Tensor):
                yield f"{name} in {frame.f_code.co_name}", value
