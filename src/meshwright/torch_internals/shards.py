"""FSDP2's own references to this rank's shards, for shards whose memory is exchanged."""

import torch
from torch import nn

from meshwright.torch_internals import _group


class Shards:
    """This rank's shards, as FSDP2 refers to them beside the parameters. 2.11-2.15; public: none."""

    def __init__(self, model: nn.Module) -> None:
        groups = [group for module in model.modules() if (group := _group(module)) is not None]
        self._parts = {id(part.sharded_param._local_tensor): part for group in groups for part in group.fsdp_params}

    def __contains__(self, shard: torch.Tensor) -> bool:
        return id(shard) in self._parts

    def like(self, shard: torch.Tensor) -> torch.Tensor:
        """What FSDP2 gathers of a shard, with its padding, as a tensor without data."""
        numel = self._parts[id(shard)].padded_sharded_param_size.numel() if shard in self else shard.numel()
        return torch.empty(numel, dtype=shard.dtype, device="meta")

    def padded(self) -> list[torch.Tensor]:
        """Shards that end before what is gathered of them."""
        shards = [part.sharded_param._local_tensor for part in self._parts.values()]
        return [shard for shard in shards if shard.numel() < self.like(shard).numel()]

    def moved(self, shard: torch.Tensor, gathered: torch.Tensor) -> None:
        """A shard has got other memory; `gathered` begins with it, and zeros follow."""
        self._parts[id(shard)]._sharded_param_data = gathered
