"""The model's weights and their gradients in files (`layout.offload.parameters: disk`).

They are in the buckets of `state/tiered.py`: a step reads and writes them with the optimizer's state. Between steps a
parameter and its gradient are mapped from its bucket's file; `state/ahead.py` reads the next blocks'. On one process in
low precision these are the weights that the model computes with, separate from the masters, which only the step reads.
In full precision they are both. Under FSDP2 they are the rank's shards, which FSDP2 gathers as from host memory.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.models.dtypes import torch_dtype
from meshwright.spec.training import TrainingSpec
from meshwright.state.ahead import BlocksAhead, Places
from meshwright.state.files import BLOCK, Home
from meshwright.state.store import Bucket, HostStore
from meshwright.state.tiered import TieredMasters, TieredStore, allocate_in
from meshwright.state.tiers import Tier
from meshwright.torch_internals import Shards, local_tensor


class _ModelOnDisk(TieredStore):
    """All larger parameters, including frozen ones, live in `tier`."""

    def begin(self, model: nn.Module, tier: Tier | None) -> None:
        """See `StateStore`."""
        super().begin(model, tier)
        self._places: Places = {}

    def move_out(self, model: nn.Module) -> None:
        """See `StateStore`: each frozen parameter gets its own home."""
        super().move_out(model)
        self._frozen: list[Home] = []
        for tensor in [local_tensor(parameter) for parameter in model.parameters() if not parameter.requires_grad]:
            if tensor.nbytes >= BLOCK:
                home = self.tier.home(f"frozen{len(self._frozen)}", self.room_of(tensor))
                tensor.data = home.tensor(0, tensor).copy_(tensor)
                self.lives_at(tensor, home, 0)
                home.forget()
                self._frozen.append(home)
        self._ahead = BlocksAhead(model, self._places)

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        """See `StateStore`: allocated in the tier, because memory has no room for all of them."""
        assert tier is not None
        allocate_in(tier, model, device, lambda tensor: isinstance(tensor, nn.Parameter))

    def lives_at(self, tensor: torch.Tensor, home: Home, offset: int) -> None:
        """See `TieredStore`."""
        self._places[id(tensor)] = tensor, home, offset

    def step(self, lr_factor: float, gradient_factor: float = 1.0) -> None:
        """See `StateStore`."""
        self._ahead.forget()
        super().step(lr_factor, gradient_factor)

    @property
    def elsewhere(self) -> list[torch.Tensor]:
        """See `StateStore`."""
        return [*super().elsewhere, *(tensor for tensor, _, _ in self._places.values())]


class WeightsOnDisk(_ModelOnDisk):
    """The parameters that the model computes with and the optimizer updates, and their gradients, live in `tier`."""

    def masters_of(self, model: nn.Module, training: TrainingSpec) -> dict[str, torch.Tensor]:
        """See `StateStore`."""
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
        """See `StateStore`."""
        super().begin(model, tier)
        self._shards = Shards(model)

    @staticmethod
    def offload_policy(device_type: str) -> OffloadPolicy:
        """See `StateStore`: mapped memory cannot be pinned."""
        return CPUOffloadPolicy(pin_memory=False)

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        """See `StateStore`."""
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
        """See `TieredStore`."""
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
