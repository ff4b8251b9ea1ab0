"""FSDP2's gather of fp8 layers' weights as fp8 codes, one byte per number.

Under `tensorwise` a matrix has one scale, from its largest value over all ranks. Each rank casts its part with this
scale before the gather, as torchao's `enable_fsdp_float8_all_gather` does. The gathered codes are those that the
products would compute from the gathered matrix. FSDP2's buffers hold the decoded numbers; encoding them again gives the
same scale and the same codes, so training is bit-identical. Other parameters are gathered in their own dtype, and
master weights stay unquantized.

One reduction computes the largest values of all matrices that are gathered together. Each matrix of stacked experts has
its own scale.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm import collectives
from meshwright.families.split import expert_shard_dim
from meshwright.models.linear import Linear
from meshwright.models.low_precision import LowPrecision
from meshwright.models.moe import ExpertLinear
from meshwright.models.scaling import E4M3, Encoded, Scaling, encode
from meshwright.models.slots import unreduced
from meshwright.parallel.mesh import Meshes
from meshwright.spec.layout import LayoutSpec
from meshwright.torch_internals import FsdpAllGather, grouped_parts

TENSORS = Scaling(E4M3, 1, None)
"""A scale for every row: for every matrix of a part."""


@dataclass(frozen=True)
class GatheredPart:
    """A rank's part of a parameter, among those that are gathered together."""

    numbers: int
    """Equal on every rank, because FSDP2 pads."""
    matrices: int = 0
    """Matrices that the part has numbers of; 0: the part is gathered in its own dtype."""
    own: bool = False
    """Whether the part is whole matrices of this rank, rather than parts of all ranks' matrices."""

    def scales(self, ranks: int) -> int:
        """Scales of the gathered parameter."""
        return self.matrices * (ranks if self.own else 1)


class Fp8AllGather(FsdpAllGather):
    """FSDP2's gather of weights; some are sent in e4m3."""

    def __init__(self, parts: Sequence[GatheredPart], others: Sequence[dist.ProcessGroup]) -> None:
        """`others`: further groups whose ranks have other parts of the same matrices."""
        self.parts, self.others = tuple(parts), tuple(others)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output with the ranks' inputs, one after another."""
        maxima = self._maxima(input_tensor, group)
        sent = [
            self._encoded(part, values, largest[group.rank() if part.own else 0]).codes.flatten().view(torch.uint8)
            if part.matrices
            else values.contiguous().view(torch.uint8)
            for (part, values), largest in zip(self._cut(input_tensor), maxima, strict=True)
        ]
        gathered = collectives.all_gather(torch.cat(sent).view(1, -1), group)
        for rank, (bytes_B, values_N) in enumerate(zip(gathered, output_tensor.view(group.size(), -1), strict=True)):
            received = bytes_B.split([len(part) for part in sent])
            for (part, values), codes, largest in zip(self._cut(values_N), received, maxima, strict=True):
                if not part.matrices:
                    values.copy_(codes.clone().view(values.dtype))
                    continue
                like = self._encoded(part, values.new_zeros(part.numbers), largest[rank if part.own else 0])
                blocks = codes.view(torch.float8_e4m3fn).view(like.codes.shape)
                values.copy_(Encoded(blocks, like.scales, like.shape, like.multiplies).decode().flatten())

    def _cut(self, values_N: torch.Tensor) -> Iterator[tuple[GatheredPart, torch.Tensor]]:
        yield from zip(self.parts, values_N.split([part.numbers for part in self.parts]), strict=True)

    def _maxima(self, values_N: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """The largest value of each matrix over all ranks, by part: [ranks, matrices] for ranks' own matrices, else [1,
        matrices]. Collective."""
        rows = [part.scales(group.size()) for part in self.parts]
        flat = values_N.new_zeros(sum(rows))
        for (part, values), largest in zip(self._cut(values_N), flat.split(rows), strict=True):
            if part.matrices:
                here = largest.view(-1, part.matrices)[group.rank() if part.own else 0]
                here.copy_(values.view(part.matrices, -1).abs().amax(1))
        for ranks in (group, *self.others):
            flat = collectives.maximum(flat, ranks)
        maxima = zip(self.parts, flat.split(rows), strict=True)
        return [largest.view(-1, max(1, part.matrices)) for part, largest in maxima]

    @staticmethod
    def _encoded(part: GatheredPart, values: torch.Tensor, largest: torch.Tensor) -> Encoded:
        """A part's numbers, encoded with the scales of its matrices."""
        return encode(values.view(part.matrices, -1), TENSORS, (unreduced, lambda _: largest.view(-1, 1, 1, 1)))


def apply_fp8_gather(model: nn.Module, meshes: Meshes, layout: LayoutSpec) -> None:
    """Set this gather in every FSDP2 group that contains fp8 layers."""
    tp, coded = meshes.axis("tp"), set[int]()
    for module in model.modules():
        if (isinstance(module, ExpertLinear) and module.product is not None) or (
            isinstance(module, Linear) and isinstance(module.product, LowPrecision)
        ):
            coded.add(id(module.weight))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        weights = [(weight, shape.numel()) for weight, shape in grouped_parts(module)]
        parts = [
            _part(weight, numbers, layout) if id(weight) in coded else GatheredPart(numbers)
            for weight, numbers in weights
        ]
        if any(part.matrices for part in parts):
            dense = any(weight.dim() == 2 and id(weight) in coded for weight, _ in weights)
            module.set_custom_all_gather(Fp8AllGather(parts, [tp.get_group()] if tp is not None and dense else ()))


def _part(weight: nn.Parameter, numbers: int, layout: LayoutSpec) -> GatheredPart:
    if weight.dim() == 2:
        return GatheredPart(numbers, 1)
    experts, shards = weight.shape[0] // layout.ep, layout.expert_shard
    own = expert_shard_dim(tuple(weight.shape), shards, split=layout.ep > 1) == 0
    return GatheredPart(numbers, numbers // math.prod(weight.shape[1:]) if own else experts, own)
