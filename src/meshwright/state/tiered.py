"""State that a step fetches a bucket at a time, from host memory or from files (`layout.offload`).

The optimizer's tensors live in host memory or in files. On a single process in low precision, so do master weights and
their gradients, because only the step needs them; so do weights that the model computes with, if `state/weights.py`
requires it. A tensor stays the same object, but its memory is exchanged: between steps it is the home's, while its
bucket is stepped it is a buffer's. Optimizers and checkpoints see no difference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.devices import of_kind, on_cpu
from meshwright.optim.adamw import ShardedAdamW
from meshwright.optim.plugged import Plugged
from meshwright.spec.errors import UserError
from meshwright.spec.model import Parameter
from meshwright.spec.pieces import PIECES
from meshwright.state.files import BLOCK, Home, rounded
from meshwright.state.masters import MasterWeights
from meshwright.state.store import Bucket, HostStore, StateStore
from meshwright.state.tiers import Mover, Tier, complaint, cut_evenly
from meshwright.torch_internals import allocate_each, local_tensor

ALIGNED = 64
"""Alignment of tensors in a bucket."""

LARGER = {"cpu": 1, "gpu": 4}
"""How many times as large buckets are: a GPU starts a copy and an update of each in turn."""


@dataclass(frozen=True)
class _Slot:
    """A tensor's position in its bucket."""

    tensor: torch.Tensor
    home: torch.Tensor
    offset: int

    def place(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor's view of its bucket's bytes."""
        part = buffer.narrow(0, self.offset, self.home.nbytes)
        return part.view(self.home.dtype).view(self.home.shape)


@dataclass(frozen=True)
class _Moved:
    """A bucket that lives elsewhere."""

    home: Home
    kept: list[_Slot]
    """Tensors that are read and written."""
    gradients: dict[str, _Slot]
    """By parameter; they come after the others and are only read."""
    kept_bytes: int
    all_bytes: int
    cached: bool
    """Whether the gradients stay in the page cache, so that no step reads or writes them."""


class TieredStore(StateStore):
    """The optimizer's tensors live in `tier`."""

    def begin(self, model: nn.Module, tier: Tier | None) -> None:
        assert tier is not None
        self.tier, self._mover = tier, Mover(tier)
        self._in_hand: torch.Tensor | None = None  # a bucket's bytes on the host, and on the device of its step
        self._here: torch.Tensor | None = None
        self._gradient_homes: dict[int, tuple[_Slot, int]] = {}
        self._cache_room = tier.cache_room
        self._warned = False

    def move_out(self, model: nn.Module) -> None:
        """See `StateStore`: the requested share, a bucket at a time. Raises `OffloadError` if there is no room."""
        self._moved = dict(self._moved_buckets())
        self._missing = {index: len(moved.gradients) for index, moved in self._moved.items()}

    def cut(self, rows: tuple[Parameter, ...]) -> Iterator[tuple[Parameter, ...]]:
        """See `StateStore`: up to `PieceSizes.bucket` parameters each, on a GPU more, the same on every rank that
        shares them."""
        left = iter(rows)
        most = PIECES.get().bucket * of_kind(LARGER, self.tier.device)
        for count in cut_evenly([_on_a_rank(self.parameters[row.name]) for row in rows], most):
            yield tuple(islice(left, count))

    def _moved_buckets(self) -> Iterator[tuple[int, _Moved]]:
        """Give the buckets' tensors homes until the requested share lives elsewhere."""
        for optimizer in self.optimizers.optimizers:
            if isinstance(optimizer, Plugged):
                raise UserError(
                    f"training.optimizer.name={optimizer.name} with "
                    f"layout.offload.optimizer={self.tier.offload.optimizer}: the state of a plug-in optimizer "
                    "cannot be offloaded, because each step may create new tensors; leave layout.offload out, or "
                    "use a built-in optimizer"
                )
        sizes = [sum(map(_on_a_rank, bucket.parameters.values())) for bucket in self.buckets]
        most, done = self.tier.offload.optimizer_share * sum(sizes), 0
        for bucket, size in zip(self.buckets, sizes, strict=True):
            done += size
            if done <= most or not bucket.index:
                yield bucket.index, self._moved_bucket(bucket)
            else:
                self.stays(bucket)

    def _moved_bucket(self, bucket: Bucket) -> _Moved:
        states = [local_tensor(tensor) for state in bucket.state.values() for tensor in state.values()]
        for optimizer in bucket.optimizers.optimizers:
            if isinstance(optimizer, ShardedAdamW):
                optimizer.count_on(self.tier.device)
        kept = [tensor for tensor in (*self.weights_in(bucket), *states) if tensor.dim() and tensor.numel()]
        gradients = self.gradients_in(bucket)
        offsets, end = _offsets(list(map(self.room_of, kept)), 0)
        kept_bytes = rounded(end)
        behind, end = _offsets([gradient.nbytes for gradient in gradients.values()], kept_bytes)
        all_bytes = max(kept_bytes, rounded(end))
        home = self.tier.home(f"bucket{bucket.index}", all_bytes)
        slots = []
        for tensor, offset in zip(kept, offsets, strict=True):
            there = home.tensor(offset, tensor)
            if not is_zero(tensor):  # the home is already zeros
                there.copy_(tensor)
            tensor.data = there
            self.lives_at(tensor, home, offset)
            slots.append(_Slot(tensor, there, offset))
        home.forget()
        of = {
            name: _Slot(there := home.tensor(offset, like), there, offset)
            for (name, like), offset in zip(gradients.items(), behind, strict=True)
        }
        for name, slot in of.items():
            self._gradient_homes[id(bucket.parameters[name])] = slot, bucket.index
        cached = 0 < all_bytes - kept_bytes <= self._cache_room
        self._cache_room -= (all_bytes - kept_bytes) * cached
        return _Moved(home, slots, of, kept_bytes, all_bytes, cached)

    def weights_in(self, bucket: Bucket) -> list[torch.Tensor]:
        """A bucket's local weights that live elsewhere: none of those that the model computes with."""
        return []

    def gradients_in(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Tensors shaped like a bucket's local gradients that live elsewhere, by parameter."""
        return {}

    def room_of(self, tensor: torch.Tensor) -> int:
        """Bytes that a tensor takes in its home."""
        return tensor.nbytes

    def lives_at(self, tensor: torch.Tensor, home: Home, offset: int) -> None:
        """Called after a tensor has been assigned its home."""

    def stays(self, bucket: Bucket) -> None:
        """Keep a bucket in memory."""

    def fetch(self, bucket: Bucket) -> None:
        """See `StateStore`; begins to read the next bucket."""
        moved = self._moved.get(bucket.index)
        if moved is None:
            return
        size = self._bytes_read(bucket, moved)
        buffer = self._mover.read(bucket.index, moved.home, size)
        if following := self._moved.get(bucket.index + 1):
            ahead = self._bytes_read(self.buckets[bucket.index + 1], following)
            self._mover.read_ahead(bucket.index + 1, following.home, ahead)
        # One copy for the whole bucket, which nobody waits for.
        here = buffer if on_cpu(self.tier.device) else buffer[:size].to(self.tier.device, non_blocking=True)
        self._in_hand, self._here = buffer, here
        given = [name for name in moved.gradients if bucket.parameters[name].grad is not None]
        for name in given:
            bucket.parameters[name].grad = None  # its home may be on another device
        for slot in moved.kept:
            slot.tensor.data = slot.place(here)
        for name in given:
            slot = moved.gradients[name]
            gradient = slot.home.to(self.tier.device) if moved.cached else slot.place(here)
            bucket.parameters[name].grad = _part_like(bucket.parameters[name], gradient)

    def _bytes_read(self, bucket: Bucket, moved: _Moved) -> int:
        """Bytes to read, including gradients if they exist and are not in the page cache."""
        there = any(bucket.parameters[name].grad is not None for name in moved.gradients)
        return moved.all_bytes if there and not moved.cached else moved.kept_bytes

    def put(self, bucket: Bucket) -> None:
        """See `StateStore`: a thread writes the bucket while the next one is stepped."""
        super().put(bucket)
        moved, buffer, here = self._moved.get(bucket.index), self._in_hand, self._here
        if moved is None or buffer is None or here is None:
            return
        self._in_hand = self._here = None
        for name in moved.gradients:
            bucket.parameters[name].grad = None
        if here is not buffer:
            buffer.narrow(0, 0, moved.kept_bytes).copy_(here.narrow(0, 0, moved.kept_bytes), non_blocking=True)
        for slot in moved.kept:
            slot.tensor.data = slot.home
        self._mover.write(bucket.index, moved.home, buffer, moved.kept_bytes)

    def step(self, lr_factor: float, gradient_factor: float = 1.0) -> None:
        """See `StateStore`: afterwards all state is at home."""
        for moved in self._moved.values():
            moved.home.forget(moved.kept_bytes if moved.cached else None)
        super().step(lr_factor, gradient_factor)
        self._mover.settle()

    def gradient_home(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The tensor elsewhere that accumulates a parameter's gradient; None if it is in memory."""
        slot, _ = self._gradient_homes.get(id(parameter), (None, -1))
        return slot and slot.home

    def move_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor elsewhere that accumulates a parameter's gradient; it holds the first microbatch's gradient."""
        slot, bucket = self._gradient_homes[id(parameter)]
        moved = self._moved[bucket]
        if moved.cached:
            return slot.home.copy_(gradient)
        moved.home.fill(slot.offset, gradient.to(slot.home.dtype))
        return slot.home

    def arrived(self, parameter: torch.Tensor) -> None:
        """Called when a microbatch's gradient has been added; a bucket's gradients go to disk when all have arrived."""
        _, bucket = self._gradient_homes.get(id(parameter), (None, -1))
        if bucket < 0 or self._moved[bucket].cached:
            return
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._missing[bucket] = len(self._moved[bucket].gradients)
            self._mover.forget(self._moved[bucket].home)

    def each_parameter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `StateStore`: a bucket's gradients leave memory before the next bucket's are read."""
        for bucket in self.buckets:
            yield from bucket.parameters.items()
            moved = self._moved.get(bucket.index)
            if moved and moved.gradients and not moved.cached:
                moved.home.forget()

    @torch.no_grad()
    def refresh(self) -> None:
        """See `StateStore`: directly from the masters' home."""
        for moved in self._moved.values():
            moved.home.changed()
        for bucket in self.buckets:
            super().put(bucket)

    @property
    def in_hand(self) -> list[torch.Tensor]:
        return [*([] if self._in_hand is None else [self._in_hand]), *self._mover.buffers]

    @property
    def elsewhere(self) -> list[torch.Tensor]:
        if self.tier.offload.optimizer != "disk":
            return []
        return [slot.home for moved in self._moved.values() for slot in (*moved.kept, *moved.gradients.values())]

    @property
    def writes_at_once(self) -> bool:
        """See `StateStore`: memory has no room for a copy of state on disk."""
        return self.tier.offload.optimizer == "disk"

    @property
    def place(self) -> str:
        return str(self.tier.directory)

    def here(self) -> Iterator[tuple[str, torch.Tensor]]:
        elsewhere = {id(slot.tensor) for moved in self._moved.values() for slot in moved.kept}
        return (entry for entry in super().here() if id(local_tensor(entry[1])) not in elsewhere)

    def complaint(self) -> str | None:
        warning = None if self._warned else complaint([moved.home for moved in self._moved.values()])
        self._warned = self._warned or warning is not None
        return warning


class TieredMasters(TieredStore, MasterWeights):
    """A single process's store: master weights and their gradients live in `tier` too."""

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        """See `StateStore`: trained parameters begin in the tier, because memory has no room for all of them in full
        precision."""
        assert tier is not None
        allocate_in(tier, model, device, lambda tensor: tensor.requires_grad)

    def copied(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `MasterWeights`: on the device, where the model computes."""
        return parameter.to(self.tier.device, dtype)

    def weights_in(self, bucket: Bucket) -> list[torch.Tensor]:
        """See `TieredStore`: all masters."""
        return list(bucket.parameters.values())

    def gradients_in(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """See `TieredStore`: all."""
        return {name: parameter.detach() for name, parameter in bucket.parameters.items() if parameter.dim()}

    def stays(self, bucket: Bucket) -> None:
        """See `TieredStore`: masters come to the device."""
        for parameter in bucket.parameters.values():
            parameter.data = parameter.data.to(self.tier.device, copy=True)

    def first_gradient(self, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.gradient_home(master) is None else self.move_gradient(master, gradient)


class TieredHost(TieredStore, HostStore):
    """Weights and gradients live in host memory, where the optimizer steps, and its state in files."""


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether all numbers are zero."""
    return not tensor.any()


def _on_a_rank(parameter: torch.Tensor) -> int:
    """Elements of a parameter on each rank; the same on all ranks."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    split = prod(mesh.size(axis) for axis, placement in enumerate(parameter.placements) if placement.is_shard())
    return -(-parameter.numel() // split)


def _offsets(sizes: list[int], start: int) -> tuple[list[int], int]:
    """Consecutive offsets of tensors of these sizes in bytes, and the end of the last."""
    offsets = []
    for size in sizes:
        offsets.append(rounded(start, ALIGNED) if start else 0)
        start = offsets[-1] + size
    return offsets, start


def _part_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's part of a tensor that is distributed like a parameter."""
    if not isinstance(parameter, DTensor):
        return local
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def allocate_in(tier: Tier, model: nn.Module, device: torch.device, chosen: Callable[[torch.Tensor], bool]) -> None:
    """Give `model`, on the meta device, memory on `device`, and its larger `chosen` tensors room in `tier`."""
    number = iter(range(2**62))

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        if not (chosen(tensor) and local.nbytes >= BLOCK):
            return torch.empty_like(tensor, device=device)
        return _part_like(tensor, tier.home(f"weights{next(number)}", local.nbytes).tensor(0, local))

    allocate_each(model, allocated)
