"""The one place for tensor parallelism: every matrix split over ranks, and between matrices the sequence.

After Megatron-LM (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022). The named dims of the
parameter table say which matrices are split, and how:

    norm -> gather the sequence -> wq wk wv, w1 w3 by columns -> wo, w2 by rows -> sum over ranks, scatter the sequence

Embedding, head and loss are split by the vocabulary, so that no rank ever holds a whole row of logits.

Parameters are DTensors on the axis `tp`, from which data parallelism, clipping and checkpoints read how they are split;
modules compute on the local tensors. One rule serves all gradients: that of a split parameter is complete on its rank;
that of a parameter which every rank keeps is what flows through this rank's part of the sequence, or through its heads,
and is summed over ranks.

Shapes: B batch, T sequence, t = T / tp (this rank's part of it), D hidden, V vocabulary.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.families.split import TP_SPLITS, is_experts, split_dim, split_range
from meshwright.models import Decoder
from meshwright.models.loss import linear_cross_entropy, linear_token_losses
from meshwright.spec.model import ModelSpec, Parameter

collectives = torch.ops._c10d_functional


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Make `model` (on the meta device) in place what one rank of `mesh`, the axis `tp`, runs.

    It still takes whole tokens, positions and labels; between blocks the residual stream is [B, t, D]. The loss is the
    same on every rank.
    """
    rows = {row.name: row for row in model.table}
    sequence = _Sequence(mesh)
    for path, module in model.named_modules():
        own = {name: rows[f"{path}.{name}"] for name in module._parameters if f"{path}.{name}" in rows}
        if not own or any(is_experts(row) for row in own.values()):
            continue  # between blocks ranks hold different tokens, so to experts they are data-parallel ranks
        _split_parameters(module, own, model.spec, mesh)
        if isinstance(module, nn.Embedding):
            _split_embedding(module, own["weight"], sequence)
        elif _is_row_wise(own):
            module.register_forward_hook(sequence.scatter_output)
            module.__dict__["complete"] = sequence.sum_over_ranks  # should an adapter ask for whole inputs
    column_wise = (name for name, row in rows.items() if len(row.dims) == 2 and row.dims[0] in TP_SPLITS)
    parents = {name.rsplit(".", 2)[0] for name in column_wise if name.startswith("layers.")}
    for path, module in model.named_modules():
        if path in parents:
            module.register_forward_pre_hook(sequence.gather_input)
    share = _VocabularyShare(model.spec.vocab, sequence)

    def loss(x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        x_ND = sequence.gather(x_BTD).flatten(0, 1)
        return linear_cross_entropy(x_ND, model.head_weight, labels_BT.flatten(), share)

    def token_losses(x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        x_ND = sequence.gather(x_BTD).flatten(0, 1)
        return linear_token_losses(x_ND, model.head_weight, labels_BT.flatten(), share).view(labels_BT.shape)

    def logits(x_BTD: torch.Tensor, asked_BT: torch.Tensor | None = None) -> torch.Tensor:
        if asked_BT is None:
            raise ValueError(
                "of a model split over tensor-parallel ranks no rank has its logits, but one place's of a row"
            )
        parts_BV = F.linear(model.pick(sequence.gather(x_BTD), asked_BT), model.head_weight)
        parts_BV = F.pad(parts_BV, (0, share.rows - parts_BV.shape[1]))  # the last rank may have fewer
        return sequence.gather(parts_BV.unsqueeze(-1)).squeeze(-1)[:, : share.vocab]

    model.loss, model.token_losses, model.logits = loss, token_losses, logits


def _split_parameters(module: nn.Module, own: dict[str, Parameter], spec: ModelSpec, mesh: DeviceMesh) -> None:
    """Make a module's parameters DTensors on `mesh`, and let the module see the local tensors of them."""
    kept: dict[str, tuple[int, int]] = {}
    for name, row in own.items():
        dim = split_dim(row, spec, mesh.size())
        if dim is None and row.dims[0] == "kv_heads":
            head = mesh.get_local_rank() * spec.num_kv_heads // mesh.size()
            kept[name] = head * spec.head_dim, (head + 1) * spec.head_dim
        parameter = module.get_parameter(name)
        placement = Replicate() if dim is None else Shard(dim)
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    # A row-wise layer's bias is added once, after the sum over ranks.
    deferred = "bias" if _is_row_wise(own) else None
    module.__class__ = _local_class(type(module), tuple(own), tuple(kept.items()), deferred)


def _is_row_wise(own: dict[str, Parameter]) -> bool:
    matrix = own.get("weight") or own.get("codes")  # codes are the matrix in few bits
    return matrix is not None and not TP_SPLITS.isdisjoint(matrix.dims[1:])


@functools.cache
def _local_class(
    cls: type, names: tuple[str, ...], kept: tuple[tuple[str, tuple[int, int]], ...], deferred: str | None
) -> type:
    """`cls` with parameters that read as local tensors, as the rows of them in `kept`, or, if `deferred`, as None.

    One class for all modules of a kind, so that torch.compile takes them for the same. While data parallelism has a
    parameter sharded, nobody computes with it, and it reads as it is.
    """

    def reader(name: str) -> property:
        def read(module: nn.Module) -> torch.Tensor | None:
            parameter = module._parameters[name]
            assert isinstance(parameter, DTensor)
            if parameter.device_mesh.ndim > 1:
                return parameter
            if name == deferred:
                return None
            tensor = _local(parameter)
            return tensor[slice(*dict(kept)[name])] if name in dict(kept) else tensor

        return property(read)

    return type(cls.__name__, (cls,), {name: reader(name) for name in names})


def _local(parameter: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=placements)


def _split_embedding(embedding: nn.Embedding, row: Parameter, sequence: "_Sequence") -> None:
    """Tokens: each rank looks up those of its rows, and the sum over ranks is scattered. Positions: each its own."""
    if row.dims[0] not in TP_SPLITS:
        embedding.register_forward_pre_hook(lambda module, args: (sequence.own(args[0]),))
        return
    vocab = row.shape[0]
    first, stop = split_range(vocab, sequence.size, sequence.rank)

    look_up = embedding.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        tokens_BT = input
        known_BT = (tokens_BT >= 0) & (tokens_BT < vocab)
        torch._assert_async(known_BT.all(), "a token is out of bounds: it lies outside the vocabulary")
        here_BT1 = ((tokens_BT >= first) & (tokens_BT < stop))[..., None]
        x_BTD = look_up((tokens_BT - first).where(here_BT1[..., 0], 0))
        return sequence.scatter_sum(x_BTD.where(here_BT1, 0))

    embedding.forward = forward


class _Sequence:
    """The collectives along the sequence of one tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    def own(self, x_BT: torch.Tensor) -> torch.Tensor:
        """This rank's part [..., t] of a whole [..., T]."""
        return x_BT.chunk(self.size, dim=-1)[self.rank]

    def gather(self, x_BtD: torch.Tensor) -> torch.Tensor:
        """The whole sequence [B, T, D]; backward, the sum over ranks of its gradient, scattered."""
        return _Gather.apply(x_BtD, self.size, self.group.group_name)

    def scatter_sum(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, t, D] of the sum over ranks; backward, the whole gradient."""
        return _ScatterSum.apply(x_BTD, self.size, self.group.group_name)

    def gather_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook for what starts with column-wise layers."""
        return self.gather(args[0]), *args[1:]

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, without a gradient."""
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", self.group.group_name))

    def scatter_output(self, module: nn.Module, args: tuple[Any, ...], output_BTD: torch.Tensor) -> torch.Tensor:
        """A forward hook for a row-wise layer."""
        x_BtD = self.scatter_sum(output_BTD)
        bias = module._parameters["bias"]
        return x_BtD if bias is None else x_BtD + _local(bias)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BtD, size, group):
        ctx.size, ctx.group = size, group
        return _gather(x_BtD, size, group)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _scatter_sum(grad_outputs[0], ctx.size, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD, size, group):
        ctx.size, ctx.group = size, group
        return _scatter_sum(x_BTD, size, group)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _gather(grad_outputs[0], ctx.size, ctx.group), None, None


def _gather(x_BtD: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Waited for at once: what leaves here is a plain tensor, which may enter a compiled block."""
    parts = collectives.wait_tensor(collectives.all_gather_into_tensor(x_BtD.contiguous(), size, group))
    return parts.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _scatter_sum(x_BTD: torch.Tensor, size: int, group: str) -> torch.Tensor:
    parts = x_BTD.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(parts, "sum", size, group))


class _VocabularyShare:
    """This rank's rows of the head, as `linear_cross_entropy` wants to know them."""

    def __init__(self, vocab: int, sequence: _Sequence) -> None:
        self.vocab = vocab
        self.first, _ = split_range(vocab, sequence.size, sequence.rank)
        _, self.rows = split_range(vocab, sequence.size, 0)
        self._group = sequence.group

    def maximum_(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)

    def sum_(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self._group)
