"""The one place that turns a layout's degrees into a device mesh."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.spec.layout import AXES, LayoutSpec


def build_mesh(layout: LayoutSpec, device_type: str) -> DeviceMesh:
    """The mesh of all ranks with every axis of `AXES` present, outermost first, degree 1 included.

    Needs an initialised process group of exactly `layout.world_size` ranks. `device_type` is "cpu" or "cuda".
    """
    degrees = tuple(getattr(layout, axis) for axis in AXES)
    return init_device_mesh(device_type, degrees, mesh_dim_names=AXES)


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """This rank's place among the ranks that read different data, in the order of `AXES`."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank()
