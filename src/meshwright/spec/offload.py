"""Offloading settings: the state that a rank keeps outside its device's memory. No torch here."""

from typing import Literal

from pydantic import Field, model_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError

PAGE_CACHE_SHARE = 0.1
"""Share of free memory that gradients on disk may take as page cache. At this share, Linux begins to write dirty pages
back (`vm.dirty_background_ratio`)."""


class OffloadSpec(Spec):
    """Where a rank keeps its state between uses: on its device, in host memory, or in files on a local disk."""

    optimizer: Literal["device", "host", "disk"] = "device"
    """Optimizer state; on one process that computes in low precision, also master weights and gradients. The step
    fetches it bucket by bucket, and reads the next bucket while one is updated."""
    optimizer_share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the optimizer state that is offloaded; the rest stays on the device."""
    parameters: Literal["device", "host", "disk"] = "device"
    """Sharded full-precision weights and gradients. host: the optimizer steps on the CPU, so its state is in host
    memory or on disk too. disk: in files with the optimizer state; on one process, which must be on a CPU, also the
    compute weights. The next blocks are read while one computes."""
    activations: Literal["device", "host"] = "device"
    """Tensors that blocks save for their backward pass: kept in host memory until then, copied while other blocks
    compute. Layers with training.recompute=full save their input only; selective recomputation is refused."""
    directory: str | None = None
    """Folder for offloaded files, on a large and fast local disk. Default: `offload` in run_dir. The files are
    anonymous, so a killed run leaves none behind. Checkpoints are stored elsewhere."""
    checksums: bool = False
    """Verify a checksum of every bucket that is read back from disk."""

    @model_validator(mode="after")
    def _sensible(self) -> "OffloadSpec":
        if self.parameters == "host" and self.optimizer == "device":
            raise UserError(
                "parameters=host with optimizer=device: offloaded parameters are updated on the host; add "
                "optimizer=host, or optimizer=disk"
            )
        if self.parameters == "host" and self.optimizer == "host" and self.optimizer_share < 1:
            raise UserError(
                f"optimizer_share={self.optimizer_share:g} with parameters=host: offloaded parameters need the "
                "whole optimizer state in host memory; leave optimizer_share out, or use optimizer=disk"
            )
        if self.parameters == "disk" and (self.optimizer != "disk" or self.optimizer_share < 1):
            given = (
                f"optimizer={self.optimizer}"
                if self.optimizer != "disk"
                else f"optimizer_share={self.optimizer_share:g}"
            )
            raise UserError(
                f"parameters=disk with {given}: parameters and optimizer state are read together; add "
                "optimizer=disk, without optimizer_share"
            )
        for field, given in (("directory", self.directory is not None), ("checksums", self.checksums)):
            if given and self.optimizer != "disk":
                raise UserError(f"{field} applies only to optimizer=disk, not optimizer={self.optimizer}")
        return self

    @property
    def moves_state(self) -> bool:
        """Whether the optimizer's state is fetched for each step."""
        return self.optimizer == "disk" or (self.optimizer == "host" and self.parameters == "device")

    @property
    def words(self) -> str:
        """The offloaded tensors, for people; empty without offloading."""
        moved = ["activations in host memory"] if self.activations == "host" else []
        if self.parameters == "host" and self.optimizer == "host":
            return ", ".join(["CPU offload", *moved])
        share = "" if self.optimizer_share == 1 else f"{self.optimizer_share:.0%} of "
        if self.parameters == "disk":
            return ", ".join(["optimizer and parameters on disk", *moved])
        where = {"device": "", "host": "in host memory", "disk": "on disk"}
        parts = [f"{share}optimizer {where[self.optimizer]}"] if self.optimizer != "device" else []
        parts += ["parameters in host memory"] if self.parameters == "host" else []
        return ", ".join(parts + moved)


NOTHING = OffloadSpec()
CPU = OffloadSpec(optimizer="host", parameters="host")
"""The section that `offload: cpu` is short for."""
DISK = OffloadSpec(optimizer="disk")
ALL_DISK = OffloadSpec(optimizer="disk", parameters="disk")
ACTIVATIONS = OffloadSpec(activations="host")
