"""Device meshes, made from a layout's degrees."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright import torch_internals
from meshwright.spec.layout import LayoutSpec


@dataclass(frozen=True)
class Meshes:
    """Views of the same ranks, which are numbered in the order of `spec.layout.AXES`, `tp` fastest.

    All have the same parent, as FSDP2 requires of a parameter's meshes. Axes of one rank are left out (except `shard`,
    which FSDP2 always needs). So are redundant views, because every axis costs process groups.
    """

    state: DeviceMesh
    """pp, replicate, shard, tp: the axes on which parameters, gradients and optimizer state are copied or split. The
    ranks of a context-parallel group share the work on their samples, so for the state they are data-parallel ranks:
    `shard` is dp_shard x cp, or under ZeRO stage 0 `replicate` is dp_replicate x cp."""
    batch: DeviceMesh | None
    """data, cp, rest, under context parallelism: `data` ranks read different samples, `cp` ranks different parts of the
    same samples."""
    experts: DeviceMesh | None
    """pp, replicate, shard, ep: like `state`, for experts, if their ranks differ. Tensor-parallel ranks hold different
    tokens of a sequence between blocks, so for the experts they are data-parallel ranks too."""
    data_rank: int
    """This rank's index among those that read different samples."""
    _axes: dict[str, DeviceMesh | None] = field(default_factory=dict, compare=False, repr=False)
    """A cache of axes: PyTorch makes a new mesh for each slice, in a millisecond."""

    def axis(self, name: str) -> DeviceMesh | None:
        """The axis pp, replicate, shard, tp, cp or ep; None if it has one rank."""
        if name not in self._axes:
            view = {"cp": self.batch, "ep": self.experts}.get(name, self.state)
            mesh = view[name] if view is not None and name in (view.mesh_dim_names or ()) else None
            self._axes[name] = mesh if mesh is not None and mesh.size() > 1 else None
        return self._axes[name]

    def rank_along(self, name: str) -> int:
        """This rank's index along an axis."""
        axis = self.axis(name)
        return 0 if axis is None else axis.get_local_rank()

    def views(self) -> Iterator[DeviceMesh]:
        """All views that exist."""
        yield from (view for view in (self.state, self.batch, self.experts) if view is not None)

    @property
    def repeats_loss(self) -> bool:
        """Whether another rank of this stage computes and counts the same share of the loss."""
        return self.rank_along("tp") > 0


def build_meshes(layout: LayoutSpec, device_type: str) -> Meshes:
    """The meshes of all ranks; collective.

    Needs an initialised process group of exactly `layout.world_size` ranks. `device_type`: the ranks' devices'.
    """
    world = init_device_mesh(device_type, (layout.world_size,), mesh_dim_names=("world",))

    def view(**axes: int) -> DeviceMesh:
        several = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        return torch_internals.unflatten(world, tuple(several.values()), tuple(several))

    state = view(pp=layout.pp, replicate=layout.replicate, shard=layout.shard, tp=layout.tp)
    batch = experts = None
    if layout.cp > 1:
        batch = view(data=layout.pp * layout.data_parallel, cp=layout.cp, rest=layout.tp)
    if layout.ep * layout.tp > 1:
        experts = view(pp=layout.pp, replicate=layout.expert_replicate, shard=layout.expert_shard, ep=layout.ep)
    return Meshes(state, batch, experts, dist.get_rank() // (layout.cp * layout.tp) % layout.data_parallel)
