"""Expert parallelism: ranks share a layer's experts and exchange tokens.

Each rank of the axis `ep` holds an equal, contiguous share of every layer's experts (GShard, Lepikhin et al., 2021).
Two all-to-all exchanges send tokens to the ranks of their experts and back. They send exactly the routed rows: no
capacity, no padding, no dropped tokens. All ranks that hold different tokens are data-parallel ranks for the experts,
including ranks that share a sequence, so the experts' gradients are summed over all of these (`Meshes.experts`).

Shapes: D hidden, I in, E experts, R ranks of `ep`, L = E / R experts of a rank; G microbatches of these ranks; M rows
from this rank's tokens, P rows for its experts.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm import collectives
from meshwright.models import Decoder
from meshwright.models.expert_faces import ExpertsFace
from meshwright.models.faces import with_face
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.foreign_stages import replace_module
from meshwright.models.moe import ComputeRows, Dispatch, ExpertLinear, MoE, Rows, read_counts
from meshwright.models.slots import Viewed
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.view import LocalView


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """Turn every layer of experts of `model` (on the meta device) in place into one rank's part.

    Data parallelism shards the experts afterwards, over `meshes.experts`.
    """
    ep = meshes.axis("ep")
    if isinstance(model, ForeignDecoder):
        if ep is not None:
            _share_foreign_experts(model, ep)
        return
    sharers = [mesh for mesh in map(meshes.axis, ("cp", "tp")) if mesh is not None]
    for layer in model.modules():
        if not isinstance(layer, MoE):
            continue
        if sharers:
            layer.router.over_sequence = SumOverRanks([mesh.get_group() for mesh in sharers])
        if ep is not None:
            for linear in layer.experts.children():
                assert isinstance(linear, ExpertLinear)
                _keep_own_experts(linear, ep)
            layer.dispatch = Exchange(ep.get_group(), math.prod(mesh.size() for mesh in sharers))


def _share_foreign_experts(model: ForeignDecoder, ep: DeviceMesh) -> None:
    foreign = model.spec.foreign
    assert foreign is not None
    assert foreign.experts is not None
    for one in foreign.experts.modules:
        for layer in one.layers:
            if str(layer) not in model.layers:  # a pipeline rank has only some of them
                continue
            path = f"{foreign.blocks}.{layer}.{one.name}"
            numbers = dict.fromkeys(one.attributes, one.count // ep.size())
            face: ExpertsFace = with_face(ExpertsFace, model.get_submodule(path), one.parameters, numbers)
            face.described = one
            _keep_own_experts(face, ep)
            face.dispatch = Exchange(ep.get_group())
            replace_module(model, path, face)


class SumOverRanks:
    """Sums counts over the ranks that share a sequence."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = groups

    def __call__(self, counts_BE: torch.Tensor) -> torch.Tensor:
        """[B, E] to [B, E]. Collective."""
        total_BE = counts_BE.clone()
        for group in self.groups:
            collectives.all_reduce_(total_BE, group)
        return total_BE


def _keep_own_experts(module: Viewed, ep: DeviceMesh) -> None:
    whole = {name: one for name, one in module._parameters.items() if one is not None}
    for name, parameter in whole.items():
        experts, *matrix = parameter.shape
        own = parameter.new_empty(experts // ep.size(), *matrix)
        part = DTensor.from_local(own, ep, [Shard(0)], run_check=False)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module.view = LocalView(dict.fromkeys(whole, 0), {}, f"ep {ep.size()}")


class Exchange(Dispatch):
    """Sends rows to the ranks of their experts and back."""

    read_counts: Callable[..., list[list[int]]] = staticmethod(read_counts)
    """A slot for the function of this name."""

    def __init__(self, group: dist.ProcessGroup, sharers: int = 1) -> None:
        """`sharers`: the number of consecutive ranks that share a microbatch."""
        self.group = group
        self.microbatches = max(1, group.size() // sharers)

    def __call__(
        self, experts: ComputeRows, x_MD: torch.Tensor, counts_E: torch.Tensor, numbers_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Dispatch`. Collective."""
        group = self.group
        counts_RL = counts_E.view(group.size(), -1)
        received_RL = collectives.all_to_all(counts_RL, group)  # rows that each rank sends for each of the experts here
        sent, received = self.read_counts(counts_RL.sum(1), received_RL.sum(1))
        x_PD = collectives.all_to_all_rows(x_MD, received, sent, group)
        # Rows arrive sorted by sender, then by expert; they are needed by expert.
        local_L = torch.arange(received_RL.shape[1], device=x_MD.device)
        local_P = local_L.repeat(group.size()).repeat_interleave(received_RL.flatten(), output_size=sum(received))
        order_P = local_P.argsort(stable=True)
        numbers_P = None
        if numbers_M is not None:
            numbers_P = collectives.all_to_all_rows(numbers_M, received, sent, group)[order_P]
        counts_LG = received_RL.unflatten(0, (self.microbatches, -1)).sum(1).t()
        y_PD = experts(x_PD[order_P], Rows(counts_LG, numbers_P))
        return collectives.all_to_all_rows(y_PD[order_P.argsort()], sent, received, group)

    def __repr__(self) -> str:
        return f"exchange over ep {self.group.size()}"
