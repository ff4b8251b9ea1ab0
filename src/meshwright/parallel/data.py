"""Data parallelism: DDP, ZeRO-1, ZeRO-2, ZeRO-3 and hybrid sharding, all through FSDP2.

All five use one mechanism (memory per rank for psi parameters, N shards, bf16 compute, in bytes):

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

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright import torch_internals
from meshwright.families.split import expert_shard_dim
from meshwright.models import Decoder
from meshwright.models.dtypes import torch_dtype
from meshwright.models.expert_faces import ExpertsFace
from meshwright.models.moe import Experts
from meshwright.parallel.fp8_gather import apply_fp8_gather
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.passes import GradientSync
from meshwright.parallel.quantized import apply_quantized
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision

SHARDS_INTEGERS = torch.__version__ >= "2.13"
"""Whether FSDP2 accepts integer parameters, such as quantized codes: 2.11 gives every shard a gradient."""


def apply_data_parallel(
    model: Decoder, meshes: Meshes, layout: LayoutSpec, precision: Precision, offload: OffloadPolicy
) -> None:
    """Shard `model` in place, one group per block and one for the rest (embeddings, last norm, head).

    Experts are a separate group where their data-parallel ranks differ from the rest: where ranks share experts, or the
    sequence between blocks. Gradients are summed over ranks, not averaged: the loss is already divided by the global
    batch's token count. Raises `UserError` for a quantized base where FSDP2 accepts no integers.
    """
    if not SHARDS_INTEGERS and not all(weight.is_floating_point() for weight in model.parameters()):
        raise UserError(
            "finetune.base: a quantized base on several processes needs PyTorch 2.13 or newer, but this is "
            f"{torch.__version__}; train on one process, or leave finetune.base out"
        )
    policy = _policy(precision)
    options: dict[str, Any] = {
        "reshard_after_forward": layout.zero_stage == 3,
        "mp_policy": policy,
        "offload_policy": offload,
    }

    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        replicated = "replicate" in (mesh.mesh_dim_names or ())
        axes = mesh["replicate", "shard"] if replicated else mesh["shard"]
        placement = functools.partial(_shard_placement, mesh["shard"].size())
        fully_shard(module, mesh=axes, shard_placement_fn=placement, **options)

    for block in model.layers.values():
        if meshes.experts is not None:
            for module in block.modules():
                if isinstance(module, Experts | ExpertsFace):
                    shard(module, meshes.experts)
        shard(block, meshes.state)
    shard(model, meshes.state)
    for module in _sharded(model.modules()):
        if meshes.axis("tp") is not None:
            torch_internals.sum_parts_in_reduce_dtype(module)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if policy.reduce_dtype is not None and policy.param_dtype is None:
            torch_internals.keep_gradients_as_reduced(module)
    apply_quantized(model, layout)
    if layout.quantized_weights == "fp8":
        apply_fp8_gather(model, meshes, layout)


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Weights are gathered in `store`, and gradients reduced in `reduce`.

    Under bf16 and fp16 the optimizer updates fp32 weights with fp32 gradients, and the model computes with
    low-precision copies. On several ranks FSDP2 keeps both; on one process `state/masters.py` does, without a process
    group. Weights kept only in bf16 are gathered in bf16, and their gradients keep the dtype of the reduction.
    """
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.store) if precision.mixed else None,
        reduce_dtype=torch_dtype(precision.reduce) if precision.narrow else None,
        cast_forward_inputs=False,
    )


def _shard_placement(shards: int, parameter: nn.Parameter) -> Shard:
    """The dim that FSDP2 splits over this many ranks, by the rules of `families.split`."""
    rows = []  # the number of ranks that they are already split over
    if isinstance(parameter, DTensor):
        axes = enumerate(parameter.placements)
        rows = [parameter.device_mesh.size(axis) for axis, placement in axes if placement.is_shard(0)]
    if parameter.dim() == 3:
        return Shard(expert_shard_dim(tuple(parameter.shape), shards, split=bool(rows)))
    return Shard(1 if any(parameter.shape[0] % ranks for ranks in rows) else 0)


class ShardedGradients(GradientSync):
    """The gradients of a model under `apply_data_parallel`."""

    def __init__(self, model: nn.Module, layout: LayoutSpec) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.layout = model, layout

    def announce(self, modules: Iterable[nn.Module], last: bool) -> None:
        """See `GradientSync`. Only before the `last` backward pass are DDP's and ZeRO-1's gradients reduced, hybrid's
        gradients reduced over replicas, and gathered weights freed."""
        for module in _sharded(modules):
            if self.layout.zero_stage <= 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:
                module.set_requires_all_reduce(last, recurse=False)
            if self.layout.zero_stage < 3:
                module.set_reshard_after_backward(last, recurse=False)

    def hold(self, modules: Iterable[nn.Module]) -> None:
        for module in _sharded(modules):
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(self.layout.zero_stage == 3, recurse=False)

    def reduce(self, modules: Iterable[nn.Module], last: bool) -> None:
        sharded = _sharded(modules)
        self.hold(sharded)
        if self.layout.zero_stage >= 2 and self.layout.dp_replicate > 1:
            torch_internals.complete_gradients(sharded)
        torch_internals.end_backward(sharded)  # casts all gradients to the dtype of their sum and reduction
        if self.layout.zero_stage >= 2 or last:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)
            self.announce(sharded, last)
            torch_internals.end_backward(sharded)
            self.hold(sharded)
        torch_internals.end_whole_backward(self.model)

    def release(self) -> None:
        release_gathered(self.model)

    def inside(self) -> Callable[..., torch.Tensor]:
        """See `GradientSync`: embeddings, last norm and head are not gathered around the blocks."""
        torch_internals.make_root(self.model)  # else the first module called would become the root
        return self.model.forward


def release_gathered(model: nn.Module) -> None:
    """Free gathered weights after forward passes that no backward pass will follow."""
    for module in _sharded(model.modules()):
        module.reshard()


def _sharded(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules that are groups of FSDP2."""
    return [module for module in modules if isinstance(module, FSDPModule)]
