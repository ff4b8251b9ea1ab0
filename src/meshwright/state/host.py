"""State in host memory (`layout.offload: cpu`): FSDP2 copies weights to the device and gradients back."""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.state.store import StateStore


class HostStore(StateStore):
    """Master weights, gradients and optimizer state live in host memory, and the optimizer steps there."""

    @staticmethod
    def home(device: torch.device) -> torch.device:
        """See `StateStore`."""
        return torch.device("cpu")

    @staticmethod
    def offload_policy(device_type: str) -> OffloadPolicy:
        """See `StateStore`: pinned memory, which a GPU reads while it computes."""
        return CPUOffloadPolicy(pin_memory=device_type == "cuda")
