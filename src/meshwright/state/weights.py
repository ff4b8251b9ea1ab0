"""The model's weights and their gradients in files (`layout.offload.parameters: disk`).

They are in the buckets of `state/tiered.py`: a step reads and writes them with the optimizer's state. Between steps a
parameter and its gradient are mapped from its bucket's file: while one block computes, the next blocks are read and the
previous ones dropped. On one process in low precision these are the weights that the model computes with, separate from
the masters, which only the step reads. In full precision they are both. Under FSDP2 they are the rank's shards, which
FSDP2 gathers as from host memory.
"""

import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.models.dtypes import torch_dtype
from meshwright.models.slots import Compute, Wrapped
from meshwright.spec.training import TrainingSpec
from meshwright.state.files import BLOCK, Home
from meshwright.state.store import Bucket, HostStore
from meshwright.state.tiered import TieredMasters, TieredStore, allocate_in
from meshwright.state.tiers import Tier
from meshwright.torch_internals import Shards, local_tensor

Places = dict[int, tuple[torch.Tensor, Home, int]]
"""Identity of a local tensor -> the tensor, its home, and its offset there."""
AHEAD = 2
"""Blocks that are read ahead: FSDP2 gathers one in advance of the backward pass."""


class _ModelOnDisk(TieredStore):
    """All larger parameters, including frozen ones, live in `tier`."""

    def begin(self, model: nn.Module, tier: Tier | None) -> None:
        super().begin(model, tier)
        self._places: Places = {}

    def move_out(self, model: nn.Module) -> None:
        """See `StateStore`: each frozen parameter gets its own home."""
        super().move_out(model)
        frozen = [local_tensor(parameter) for parameter in model.parameters() if not parameter.requires_grad]
        for number, tensor in enumerate(tensor for tensor in frozen if tensor.nbytes >= BLOCK):
            home = self.tier.home(f"frozen{number}", self.room_of(tensor))
            tensor.data = home.tensor(0, tensor).copy_(tensor)
            self.lives_at(tensor, home, 0)
            home.forget()
        self._ahead = BlocksAhead(model, self._places)

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        """See `StateStore`: allocated in the tier, because memory has no room for all of them."""
        assert tier is not None
        allocate_in(tier, model, device, lambda tensor: isinstance(tensor, nn.Parameter))

    def lives_at(self, tensor: torch.Tensor, home: Home, offset: int) -> None:
        self._places[id(tensor)] = tensor, home, offset

    def step(self, lr_factor: float, gradient_factor: float = 1.0) -> None:
        self._ahead.forget()
        super().step(lr_factor, gradient_factor)

    @property
    def elsewhere(self) -> list[torch.Tensor]:
        return [*super().elsewhere, *(tensor for tensor, _, _ in self._places.values())]


class WeightsOnDisk(_ModelOnDisk):
    """The parameters that the model computes with and the optimizer updates, and their gradients, live in `tier`."""

    def masters_of(self, model: nn.Module, training: TrainingSpec) -> dict[str, torch.Tensor]:
        masters = super().masters_of(model, training)
        self._gradient_dtype = torch_dtype(training.dtypes.gradient)
        for master in masters.values():
            master.register_post_accumulate_grad_hook(self._keep_gradient)
        return masters

    def weights_in(self, bucket: Bucket) -> list[torch.Tensor]:
        """See `TieredStore`: all."""
        return list(map(local_tensor, bucket.parameters.values()))

    def gradients_in(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """See `TieredStore`: all."""
        parts = {name: local_tensor(parameter) for name, parameter in bucket.parameters.items()}
        return {
            name: torch.empty(part.shape, dtype=self._gradient_dtype, device="meta")
            for name, part in parts.items()
            if part.dim() and part.numel()
        }

    @torch.no_grad()
    def _keep_gradient(self, parameter: torch.Tensor) -> None:
        """Move a gradient to its home; further microbatches' are added to it there."""
        home, gradient = self.gradient_home(parameter), parameter.grad
        if home is None or gradient is None:
            return
        here = local_tensor(gradient)
        if here.untyped_storage() is not home.untyped_storage():
            here.data = self.move_gradient(parameter, here)
        self.arrived(parameter)


class ShardsOnDisk(WeightsOnDisk, HostStore):
    """FSDP2's shards live in `tier`, and the optimizer steps on the host."""

    def begin(self, model: nn.Module, tier: Tier | None) -> None:
        super().begin(model, tier)
        self._shards = Shards(model)

    @staticmethod
    def offload_policy(device_type: str) -> OffloadPolicy:
        """See `StateStore`: mapped memory cannot be pinned."""
        return CPUOffloadPolicy(pin_memory=False)

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        assert tier is not None
        _ModelOnDisk.allocate(model, device, tier)
        shards = Shards(model)
        for number, shard in enumerate(shards.padded()):  # FSDP2 has allocated their memory
            home = tier.home(f"padded{number}", shards.like(shard).nbytes)
            shard.data = home.tensor(0, shard)
            shards.moved(shard, home.tensor(0, shards.like(shard)))

    def room_of(self, tensor: torch.Tensor) -> int:
        """See `TieredStore`: with FSDP2's padding."""
        return self._shards.like(tensor).nbytes

    def lives_at(self, tensor: torch.Tensor, home: Home, offset: int) -> None:
        super().lives_at(tensor, home, offset)
        if tensor in self._shards:
            self._shards.moved(tensor, home.tensor(offset, self._shards.like(tensor)))


class CopiesOnDisk(_ModelOnDisk, TieredMasters):
    """One process's weights in low precision live in `tier`, in the buckets of their masters."""

    def copied(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `MasterWeights`: in a file, until its bucket has one."""
        like = torch.empty(parameter.shape, dtype=dtype, device="meta")
        if like.nbytes < BLOCK:
            return super().copied(parameter, dtype)
        return self.tier.home(f"copy{len(self._copies)}", like.nbytes).tensor(0, like).copy_(parameter)

    def weights_in(self, bucket: Bucket) -> list[torch.Tensor]:
        """See `TieredStore`: copies and masters."""
        return [*(self._copies[name] for name in bucket.parameters), *super().weights_in(bucket)]


class BlocksAhead:
    """The blocks of a model, in the order in which passes enter them. The parameters outside them count as another
    block after the last."""

    def __init__(self, model: nn.Module, places: Places) -> None:
        blocks = [block for block in model.get_submodule("layers").children() if isinstance(block, Wrapped)]
        inside = {id(local_tensor(parameter)) for block in blocks for parameter in block.parameters()}
        rest = (parameter for parameter in model.parameters() if id(local_tensor(parameter)) not in inside)
        self._parts = [_parts(block.parameters(), places) for block in blocks] + [_parts(rest, places)]
        self._held: dict[int, Future[None]] = {}
        """Blocks that are in memory or being read."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-ahead")
        for index, block in enumerate(blocks):
            block.wrap(_Entered(weakref.ref(self), index))

    def enter(self, index: int, way: int) -> None:
        """A pass enters a block: forward with `way` 1, backward with -1. Raises `OffloadError` if a file fails."""
        outside = len(self._parts) - 1
        order = (index + step * way for step in range(AHEAD + 1))
        wanted = [outside if place == -1 else place for place in order if -1 <= place <= outside]
        self._drop(self._held.keys() - set(wanted))
        for place in wanted:
            if place not in self._held:
                self._held[place] = self._thread.submit(self._read, place)
        self._held[index].result()

    def forget(self) -> None:
        """Drop all blocks, before their files change."""
        self._drop(set(self._held))

    def _drop(self, places: Iterable[int]) -> None:
        for place in places:
            del self._held[place]
            self._thread.submit(self._leave, place)

    def _read(self, place: int) -> None:
        for home, offset, size in self._parts[place]:
            home.expect(offset, size)

    def _leave(self, place: int) -> None:
        for home, offset, size in self._parts[place]:
            home.drop(offset, size)


def _parts(parameters: Iterable[torch.Tensor], places: Places) -> list[tuple[Home, int, int]]:
    """Home, offset and bytes of the parameters that have homes."""
    homes = (places.get(id(local_tensor(parameter))) for parameter in parameters)
    return [(home, offset, tensor.nbytes) for tensor, home, offset in filter(None, homes)]


class _Entered:
    """A wrapper of a block that reports when passes enter it."""

    def __init__(self, blocks: "weakref.ref[BlocksAhead]", index: int) -> None:
        self._blocks, self._index = blocks, index

    def __call__(self, compute: Compute) -> Compute:
        """The block's forward pass; its backward pass begins with the gradient of its result."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(1)
            result = compute(*args, **kwargs)
            if result.requires_grad:
                result.register_hook(lambda gradient: self._enter(-1))
            return result

        return run

    def _enter(self, way: int) -> None:
        blocks = self._blocks()
        assert blocks is not None, "the store lives as long as its model trains"
        blocks.enter(self._index, way)

    def __repr__(self) -> str:
        return "weights on disk"
