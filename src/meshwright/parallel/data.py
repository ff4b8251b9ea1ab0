"""The one place for data parallelism: DDP, ZeRO-1, ZeRO-2, ZeRO-3 and hybrid sharding, all through FSDP2.

One mechanism serves the five (memory per rank for psi parameters, N shards, bf16 compute, in bytes):

| strategy | between steps  | during a step, besides activations              | sent        |
|----------|----------------|-------------------------------------------------|-------------|
| DDP      | 12 psi         | + 2 psi weights, 4 psi gradients                | 2 psi       |
| ZeRO-1   | 12 psi/N       | + 2 psi weights, 4 psi gradients to the last    | psi + psi   |
| ZeRO-2   | 12 psi/N       | + 2 psi weights, 4 psi/N gradients              | psi + psi   |
| ZeRO-3   | 12 psi/N       | + one block's weights, 4 psi/N gradients        | 2 psi + psi |
| hybrid   | as its stage, N = dp_shard, and gradients are reduced over replicas  | + psi/N     |

Between steps a rank keeps fp32 weights and AdamW's two moments.
ZeRO-1 and ZeRO-2 gather the weights once a step and keep them until the last microbatch's backward pass; ZeRO-3 gathers
each block for its forward pass and again for its backward pass. "Sent" counts each gradient or weight once, in its own
dtype; ZeRO-2 and ZeRO-3 reduce gradients at every microbatch, DDP and ZeRO-1 at the last one only.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from meshwright.models import Decoder
from meshwright.spec.layout import LayoutSpec


def apply_data_parallel(model: Decoder, mesh: DeviceMesh, layout: LayoutSpec, policy: MixedPrecisionPolicy) -> None:
    """Shard `model` in place, one group per block and one for the rest (embeddings, last norm, head).

    Gradients are summed over ranks, not averaged: the loss is already divided by the global batch's token count.
    """
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"],
        "reshard_after_forward": layout.zero_stage == 3,
        "mp_policy": policy,
        "offload_policy": _offload_policy(layout, mesh.device_type),
        "shard_placement_fn": _shard_placement,
    }
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _shard_placement(parameter: nn.Parameter) -> Shard:
    """The dim that FSDP2 splits: `families.split.shard_dim`, which says why."""
    unequal = isinstance(parameter, DTensor) and any(
        placement.is_shard(0) and parameter.shape[0] % parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
    )
    return Shard(1 if unequal else 0)


def set_gradient_sync(model: nn.Module, layout: LayoutSpec, *, last_microbatch: bool) -> None:
    """Say before each microbatch's forward pass whether its backward pass ends the accumulation.

    Only then are DDP's and ZeRO-1's gradients reduced, hybrid's reduced over replicas, and gathered weights freed.
    """
    if not isinstance(model, FSDPModule):
        return
    if layout.zero_stage <= 1:
        model.set_requires_gradient_sync(last_microbatch)
    else:
        model.set_requires_all_reduce(last_microbatch)
    if layout.zero_stage < 3:
        model.set_reshard_after_backward(last_microbatch)


def _offload_policy(layout: LayoutSpec, device_type: str) -> OffloadPolicy:
    if layout.offload == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type == "cuda")


def release_gathered(model: nn.Module) -> None:
    """Free gathered weights after forward passes that no backward pass will follow."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
