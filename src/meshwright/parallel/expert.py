"""The one place for expert parallelism: ranks share out a layer's experts and send one another their tokens.

Each rank of the axis `ep` keeps an equal run of every layer's experts (GShard, Lepikhin et al., 2021). Its tokens go to
the ranks of their experts and come back, two all-to-all exchanges of as many rows as the router has sent; no capacity,
no padding, nothing dropped. To the experts all ranks that hold different tokens are data-parallel ranks, those of one
sequence included, so their gradients are summed over all of these: `Meshes.experts` is the view that says so.

Shapes: D hidden, I in, E experts, R ranks of `ep`, L = E / R experts of a rank; M rows that this rank's tokens make, P
rows that its experts get.
"""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.models import Decoder, moe
from meshwright.models.moe import ExpertLinear, Experts, MoE, grouped_matmul
from meshwright.parallel.mesh import Meshes


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """Make every layer of experts of `model` (on the meta device) in place what one rank runs.

    Data parallelism shards the experts afterwards, over `meshes.experts`.
    """
    ep = meshes.axis("ep")
    sharers = [mesh for mesh in map(meshes.axis, ("cp", "tp")) if mesh is not None]
    for layer in model.modules():
        if not isinstance(layer, MoE):
            continue
        if sharers:
            groups = [mesh.get_group() for mesh in sharers]
            layer.router.sum_over_sequence = functools.partial(_sum_over_ranks, groups)
        if ep is not None:
            for linear in layer.experts.children():
                assert isinstance(linear, ExpertLinear)
                _keep_own_experts(linear, ep)
            layer.run_experts = functools.partial(_exchange, layer.experts, ep.get_group())


def _sum_over_ranks(groups: Sequence[dist.ProcessGroup], counts_BE: torch.Tensor) -> torch.Tensor:
    """The counts of whole sequences, of which each rank has a part."""
    total_BE = counts_BE.clone()
    for group in groups:
        dist.all_reduce(total_BE, group=group)
    return total_BE


def _keep_own_experts(linear: ExpertLinear, ep: DeviceMesh) -> None:
    experts, *matrix = linear.weight.shape
    own = linear.weight.new_empty(experts // ep.size(), *matrix)
    weight = DTensor.from_local(own, ep, [Shard(0)], run_check=False)
    linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    linear.forward = functools.partial(_by_own_experts, linear)


def _by_own_experts(linear: ExpertLinear, x_MI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    weight = linear.weight
    assert isinstance(weight, DTensor)
    return grouped_matmul(x_MI, weight.to_local(), counts_E)


def _exchange(experts: Experts, group: dist.ProcessGroup, x_MD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """What `MoE.run_experts` does: rows sorted by expert through their experts, wherever these are. Collective."""
    counts_RL = counts_E.view(group.size(), -1)
    received_RL = torch.empty_like(counts_RL)  # rows that each rank sends for each of the experts here
    dist.all_to_all_single(received_RL, counts_RL, group=group)
    sent, received = moe.read_counts(counts_RL.sum(1), received_RL.sum(1))
    x_PD = _all_to_all(x_MD, received, sent, group)
    # By sender they arrive, and of each sender by expert; they are wanted by expert.
    local_L = torch.arange(received_RL.shape[1], device=x_MD.device)
    local_P = local_L.repeat(group.size()).repeat_interleave(received_RL.flatten(), output_size=sum(received))
    order_P = local_P.argsort(stable=True)
    y_PD = experts(x_PD[order_P], received_RL.sum(0))
    return _all_to_all(y_PD[order_P.argsort()], sent, received, group)


def _all_to_all(x_D: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows for each rank in turn, exchanged for rows of each rank in turn; backward, their gradients go back."""
    return collectives.wait_tensor(collectives.all_to_all_single_autograd(x_D, received, sent, group))
