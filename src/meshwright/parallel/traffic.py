"""Traffic counting: every collective by kind and mesh axis, with its bytes."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import Meshes
from meshwright.torch_internals import DispatchMode, leaves, process_group_of

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""Names of operations in torch's namespaces `c10d` and `_c10d_functional` -> their usual names. Waits, barriers and
exchanges of Python objects are not counted."""


@dataclass
class Count:
    """How often a rank took part in a collective, and the bytes of the whole tensors: a gather's output, a scatter's or
    an all-to-all's input, the reduced tensor, the message."""

    calls: int = 0
    bytes: int = 0


class Traffic(DispatchMode):
    """Counts collectives while it is entered: `counts[kind, axis]`, the axis by its name in `Meshes`, or `world` for
    all ranks."""

    def __init__(self, meshes: Meshes | None = None) -> None:
        super().__init__()
        self.counts: defaultdict[tuple[str, str], Count] = defaultdict(Count)
        self._axes = {} if meshes is None else axis_names(meshes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in KINDS:
            group = process_group_of(function, args, kwargs or {}) or dist.group.WORLD
            assert group is not None
            count = self.counts[KINDS[name], self._axes.get(ranks_of(group), "world")]
            count.calls += 1
            count.bytes += max(_sizes(name, args, kwargs, result), default=0)
        return result


def _sizes(name: str, *values: Any) -> Iterator[int]:
    """Bytes of every tensor among a collective's arguments and results; for an all-to-all, whose output may be larger,
    bytes of its input."""
    if KINDS[name] == "all-to-all":
        (args, *_) = values
        values = args[1] if name.startswith("alltoall") else args[0]  # these take the output first
    yield from (leaf.nbytes for leaf in leaves(values) if isinstance(leaf, torch.Tensor))


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group; several groups may have the same ranks, because slices of meshes make their own."""
    return tuple(dist.get_process_group_ranks(group))


def axis_names(meshes: Meshes) -> dict[tuple[int, ...], str]:
    """Ranks of a process group -> name of their axis; the experts' own axes are `expert replicate` and `expert
    shard`."""
    names: dict[tuple[int, ...], str] = {}

    def add(view: DeviceMesh, prefix: str = "") -> None:
        for axis in view.mesh_dim_names or ():
            if view[axis].size() > 1:
                names.setdefault(ranks_of(view.get_group(axis)), axis if axis in ("pp", "tp", "ep") else prefix + axis)

    add(meshes.state)
    if meshes.batch is not None:
        add(meshes.batch)
    names.setdefault(tuple(range(dist.get_world_size())), "world")
    if meshes.experts is not None:
        add(meshes.experts, "expert ")
    return names
