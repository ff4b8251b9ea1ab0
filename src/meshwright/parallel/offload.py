"""Activation offload: tensors saved for a block's backward pass stay in host memory (`layout.offload.activations`).

A block's forward pass runs under autograd's hooks for saved tensors. Each saved tensor is copied to host memory, once
even if several operations save it. When the forward pass ends, the device's memory is free again. The backward pass of
a block waits for its own tensors and prefetches those of the block before. On a GPU, copies run on their own stream,
from and to pinned memory.

Weights and tensors shared by all blocks (rotary tables, masks) stay on the device. A block that recomputes everything
saves only its input, so only its input is moved.

A copy of a dense tensor keeps its strides, so the backward pass gives the same bits. A view with gaps (one half of a
product) comes back contiguous. Our own blocks save no such views; transformers' mixtures of experts do, and differ in
the last bit.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshwright.devices import CPU, current_stream, has_streams, host_rooms, on_stream, side_stream
from meshwright.models.slots import Compute, Wrapped
from meshwright.torch_internals import leaves, local_tensor

SMALLEST = 2**12
"""Smaller tensors, in bytes, stay on the device: a copy would cost more than it frees."""


class HostCopy:
    """A saved tensor in host memory, pinned for a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self._back: torch.Tensor | None = None
        if not has_streams(self.device):
            self._host = tensor.detach().to(CPU, copy=True)
            return
        rooms = host_rooms(self.device)
        self._host = rooms.like(tensor)
        weakref.finalize(self, rooms.give_back, self._host)
        side = side_stream(self.device)
        side.wait_stream(current_stream(self.device))
        with on_stream(side):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)

    def fetch(self) -> None:
        """Begin the copy to the device."""
        if self._back is None and has_streams(self.device):
            with on_stream(side_stream(self.device)):
                self._back = self._host.to(self.device, non_blocking=True)
                self._ready = current_stream(self.device).record_event()

    def back(self) -> torch.Tensor:
        """The tensor on its device; the same one at every call."""
        self.fetch()
        if self._back is None:
            return self._host.to(self.device)
        stream = current_stream(self.device)
        stream.wait_event(self._ready)
        self._back.record_stream(stream)
        return self._back


class _Pass:
    """One forward pass of a block: its saved tensors, and the pass of the block before."""

    def __init__(self, copy: Callable[[torch.Tensor], HostCopy], stay: set[int], before: "_Pass | None") -> None:
        self._copy, self._stay, self._before = copy, stay, before
        self._made: dict[tuple[Any, ...], tuple[torch.Tensor, HostCopy]] = {}  # with the tensor, so that its id lasts
        self._copies: list[weakref.ref[HostCopy]] = []
        self._unpacked = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        """The object that autograd keeps for a tensor."""
        if isinstance(tensor, nn.Parameter | DTensor) or tensor.nbytes < SMALLEST:
            return tensor
        storage = id(tensor.untyped_storage())
        if storage in self._stay:
            return tensor
        key = storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        if key not in self._made:
            self._made[key] = tensor, self._copy(tensor)
        return self._made[key][1]

    def unpack(self, kept: torch.Tensor | HostCopy) -> torch.Tensor:
        """The tensor again; the first call of a pass also prefetches for the block before."""
        if isinstance(kept, torch.Tensor):
            return kept
        if not self._unpacked:
            self._unpacked = True
            for copy in self._before._copies if self._before is not None else ():
                if (host_copy := copy()) is not None:
                    host_copy.fetch()
            self._before = None
        return kept.back()

    def end(self) -> None:
        """The forward pass has ended: autograd alone keeps the copies."""
        self._copies = [weakref.ref(copy) for _, copy in self._made.values()]
        self._made.clear()


class Offloaded:
    """A forward pass of a block with its saved tensors in host memory."""

    def __init__(self, block: nn.Module, before: "Offloaded | None") -> None:
        """`before`: the block before this one, whose backward pass comes next."""
        self._block, self._before = weakref.ref(block), before
        self.copy: Callable[[torch.Tensor], HostCopy] = HostCopy
        self._last: weakref.ref[_Pass] | None = None

    def __call__(self, compute: Compute) -> Compute:
        """`compute` with its activations offloaded."""

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compute(x, *args, **kwargs)
            one = _Pass(self.copy, self._shared(args, kwargs), self._before.last if self._before else None)
            self._last = weakref.ref(one)
            try:
                with saved_tensors_hooks(one.pack, one.unpack):
                    return compute(x, *args, **kwargs)
            finally:
                one.end()

        return run

    @property
    def last(self) -> _Pass | None:
        """The newest forward pass whose backward pass has not ended."""
        return self._last() if self._last is not None else None

    def _shared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Ids of storages that stay on the device: the block's weights and buffers, and inputs shared with other
        blocks."""
        block = self._block()
        assert block is not None
        tensors = [*block.parameters(), *block.buffers(), *leaves([args, kwargs])]
        local = (local_tensor(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
        return {id(tensor.untyped_storage()) for tensor in local}

    def __repr__(self) -> str:
        return "activations in host memory"


def apply_activation_offload(blocks: nn.ModuleDict) -> None:
    """Keep every block's saved activations in host memory. Apply recomputation and compilation first."""
    before = None
    for block in blocks.values():
        assert isinstance(block, Wrapped)
        before = Offloaded(block, before)
        block.wrap(before)
