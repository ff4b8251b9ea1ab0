"""The global gradient norm: every element counted once, however the tensors are sharded."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.comm import collectives
from meshwright.devices import on_cpu
from meshwright.optim.shards import local
from meshwright.spec.errors import UserError
from meshwright.torch_internals import multiply_all_, norms_of_all


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[torch.Tensor],
    stages: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The 2-norm over all gradients, the same 0-dim tensor on `device` (fp32 or wider) on every rank.

    Squares are summed over local shards first and over ranks once for each set of mesh axes that shards a tensor, so
    parameters on different meshes may be mixed. `stages`: ranks that hold the other parameters, pipeline stages.
    """
    totals: dict[tuple, torch.Tensor] = {}
    waiting: dict[tuple[tuple, torch.dtype], list[torch.Tensor]] = {}
    groups: dict[tuple, list[dist.ProcessGroup]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        key: tuple = ()
        if isinstance(gradient, DTensor):
            assert not any(placement.is_partial() for placement in gradient.placements)
            mesh = gradient.device_mesh
            axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
            key = (mesh, axes)
            groups[key] = [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]
            gradient = gradient.to_local()
        if on_cpu(gradient):  # at once: an offloaded gradient leaves memory before the next one comes
            totals[key] = totals.get(key, 0.0) + sum_of_squares([gradient])
        else:
            waiting.setdefault((key, gradient.dtype), []).append(gradient)
    for (key, _), gradients in waiting.items():
        totals[key] = totals.get(key, 0.0) + sum_of_squares(gradients)
    if not totals and stages is None:
        raise UserError("no parameter has a gradient, so the gradient norm is undefined")
    for key, total in totals.items():
        for group in groups.get(key, ()):
            collectives.all_reduce_(total, group)
    if stages is None:
        return torch.stack(list(totals.values())).sum().sqrt()
    whole = torch.zeros((), dtype=torch.float64, device=device)  # zero if a stage has no trained parameters
    for total in totals.values():
        whole += total
    return collectives.all_reduce_(whole, stages).sqrt()


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all squared elements of tensors of one dtype, 0-dim in fp32 or wider, in few kernels."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(norms_of_all(tensors, wide)).square().sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by `factor` in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        multiply_all_([local(gradient) for gradient in gradients], factor)
