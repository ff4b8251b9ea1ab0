"""The view of a layer whose parameters are DTensors: the plain tensors of this rank.

One rule covers all gradients: a split parameter's gradient is complete on its rank; a replicated parameter's gradient
is this rank's share, and is summed over ranks.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.models.slots import View, Weights


class LocalView(View):
    """A layer's parameters as local tensors, for some of them only a part of the rows.

    FSDP2 gathers and swaps the registered parameters themselves, so only a view may be local. It is read in the forward
    pass, while they are gathered and are DTensors of one axis.
    """

    def __init__(
        self,
        split: Mapping[str, int],
        rows: Mapping[str, tuple[int, int]],
        axis: str,
        repeated: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """A layer's view.

        Args:
            split: the dim of each parameter that is split over the ranks of `axis`, for display.
            rows: this rank's rows, (start, stop), of replicated parameters.
            repeated: replicated parameters whose whole gradient every rank computes.
            absent: replicated parameters that this rank reads as zeros, because another adds them to a sum.
        """
        self.split, self.rows, self.axis, self.repeated, self.absent = split, rows, axis, repeated, absent

    def read(self, module: nn.Module) -> Weights:
        weights: Weights = {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                weights[name] = None
                continue
            tensor = _local(parameter, name not in self.repeated)
            tensor = tensor * 0 if name in self.absent else tensor
            weights[name] = tensor[slice(*self.rows[name])] if name in self.rows else tensor
        return weights

    def readable(self, module: nn.Module) -> bool:
        parameters = (parameter for parameter in module._parameters.values() if isinstance(parameter, DTensor))
        return all(parameter.device_mesh.ndim == 1 for parameter in parameters)

    def __repr__(self) -> str:
        parts = [f"{name} dim {dim}" for name, dim in self.split.items()]
        parts += [f"{name} rows {start}:{stop}" for name, (start, stop) in self.rows.items()]
        parts += [f"{name} on another rank" for name in self.absent]
        return f"{self.axis}: {', '.join(parts) or 'whole'}"


def _local(parameter: torch.Tensor, partial: bool) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    assert parameter.device_mesh.ndim == 1, "a sharded parameter is read before it is gathered"
    whole = Partial() if partial else Replicate()
    placements = [whole if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=placements)
