"""A planned layout on the machines: the groups of its ranks, and the bytes of a step on each kind of link."""

from collections import defaultdict
from dataclasses import dataclass

from meshwright.predict.candidate import Candidate
from meshwright.predict.comm import CommGroup, axis_group
from meshwright.predict.traffic import traffic_without_maxima
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import ResolvedRun, Run

ON_WIRE = {"all-reduce": 2.0, "receive": 0.0}
"""Times that a rank's bytes are on its wire, if not once."""
TITLES = {
    "shard": "weights and gradients (ZeRO)",
    "replicate": "gradients over replicas",
    "cp": "keys and values (cp)",
    "tp": "activations (tp)",
    "pp": "activations between stages (pp)",
    "ep": "tokens to experts (ep)",
    "expert shard": "experts' weights and gradients",
    "expert replicate": "experts' gradients over replicas",
    "world": "counts and losses",
}


@dataclass(frozen=True)
class AxisTraffic:
    """What one device sends in a step for one purpose, in bytes."""

    title: str
    group: CommGroup
    link: float
    """Over the fast link inside its node (or rack)."""
    network: float
    """Over the network between nodes: the device's share of its node's."""


def link_traffic(run: Run, model: ModelSpec, layout: Candidate) -> list[AxisTraffic]:
    """The traffic of a recipe's layout by purpose; `layout`: the same with its costs. Raises `UserError` where it is
    not predicted."""
    job, cluster = layout.job, layout.cluster
    resolved = ResolvedRun(
        run=run,
        model=model,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        accumulation=job.microbatches,
        stage_layers=job.cut if job.layout.pp > 1 else (),
        reasons={},
    )
    total: defaultdict[str, float] = defaultdict(float)
    for (kind, axis), size in traffic_without_maxima(resolved).items():
        total[axis] += size * ON_WIRE.get(kind, 1.0)
    return [_split(axis, size, job.layout, cluster) for axis, size in total.items()]


def _split(axis: str, size: float, layout: LayoutSpec, cluster: ClusterSpec) -> AxisTraffic:
    group = group_of(axis, layout, cluster)
    if axis == "pp":
        far = group.local == 1
        return AxisTraffic(TITLES[axis], group, 0.0 if far else size, size if far else 0.0)
    wire = size * (group.ranks - 1) / group.ranks
    if axis == "ep":  # everyone to everyone
        near = size * (group.local - 1) / group.ranks
        return AxisTraffic(TITLES[axis], group, near, size * (group.ranks - group.local) / group.ranks)
    crosses = group.domains > 1
    return AxisTraffic(
        TITLES[axis], group, wire if group.local > 1 else 0.0, wire / max(1, group.local) if crosses else 0.0
    )


def group_of(axis: str, layout: LayoutSpec, cluster: ClusterSpec) -> CommGroup:
    """The ranks that communicate along an axis: how many, and how many of them are in one node (or rack)."""
    inner = layout.tp * layout.cp
    degree, stride = {
        "shard": (layout.shard, layout.tp),
        "replicate": (layout.replicate, inner * layout.dp_shard),
        "cp": (layout.cp, layout.tp),
        "tp": (layout.tp, 1),
        "pp": (layout.pp, layout.world_size // layout.pp),
        "ep": (layout.ep, 1),
        "expert shard": (layout.expert_shard, layout.ep),
        "expert replicate": (layout.expert_replicate, layout.ep * layout.expert_shard),
        "world": (layout.world_size, 1),
    }[axis]
    return axis_group(cluster, degree, stride)
