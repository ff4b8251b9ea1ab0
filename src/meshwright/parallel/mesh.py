"""The one place that turns a layout's degrees into device meshes."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.spec.layout import LayoutSpec


@dataclass(frozen=True)
class Meshes:
    """Three views of the same ranks, which are numbered in the order of `spec.layout.AXES`, `tp` fastest.

    All have the same parent, as FSDP2 demands of the meshes that a parameter lies on. Every axis is present in its
    view, degree 1 included.
    """

    state: DeviceMesh
    """pp, replicate, shard, tp: on which axes parameters, gradients and optimizer state are copied or split. The
    ranks of a context-parallel group share the work on their samples, so to the state they are data-parallel ranks:
    `shard` is dp_shard x cp, or under ZeRO stage 0 `replicate` is dp_replicate x cp."""
    batch: DeviceMesh
    """pp, data, cp, tp: `data` ranks read different samples, `cp` ranks different parts of the same samples."""
    experts: DeviceMesh
    """pp, replicate, shard, ep: as `state`, for experts. Tensor-parallel ranks hold different tokens of a sequence
    between blocks, so to the experts they are data-parallel ranks too."""

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different samples."""
        return self.batch["data"].get_local_rank()

    @property
    def repeats_loss(self) -> bool:
        """Whether another rank of this stage computes the same share of the loss as this one, and counts it."""
        return self.batch["tp"].get_local_rank() > 0


def build_meshes(layout: LayoutSpec, device_type: str) -> Meshes:
    """The meshes of all ranks; collective.

    Needs an initialised process group of exactly `layout.world_size` ranks. `device_type` is "cpu" or "cuda".
    """
    world = init_device_mesh(device_type, (layout.world_size,), mesh_dim_names=("world",))

    def view(**axes: int) -> DeviceMesh:
        return world._unflatten(0, tuple(axes.values()), tuple(axes))

    return Meshes(
        state=view(pp=layout.pp, replicate=layout.replicate, shard=layout.shard, tp=layout.tp),
        batch=view(pp=layout.pp, data=layout.data_parallel, cp=layout.cp, tp=layout.tp),
        experts=view(pp=layout.pp, replicate=layout.expert_replicate, shard=layout.expert_shard, ep=layout.ep),
    )
