"""Tensor parallelism: every matrix split over ranks, and the sequence split between matrices.

After Megatron-LM (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022). The named dims of the
parameter table say which matrices are split, and how:

    norm -> gather the sequence -> wq wk wv, w1 w3 by columns -> wo, w2 by rows -> sum over ranks, scatter the sequence

Embedding, head and loss are split by the vocabulary, so that no rank ever holds a whole row of logits.

Parameters are DTensors on the axis `tp`; data parallelism, clipping and checkpoints read the split from them. Modules
compute on the local tensors. One rule covers all gradients: a split parameter's gradient is complete on its rank; a
replicated parameter's gradient covers this rank's part of the sequence, or its heads, and is summed over ranks.

Shapes: B batch, T sequence, t = T / tp (this rank's part of it), D hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.comm import collectives
from meshwright.families.split import TP_SPLITS, is_experts, split_dim, split_range
from meshwright.models import Decoder
from meshwright.models.adapters import Lora
from meshwright.models.embedding import Embedding
from meshwright.models.linear import Linear
from meshwright.models.norm import RMSNorm
from meshwright.models.slots import Op, OpPosition, Viewed, Weights
from meshwright.parallel.view import LocalView
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.torch_internals import assert_on_device


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Turn `model` (on the meta device) in place into the part of one rank of `mesh`, the axis `tp`.

    It still takes whole tokens, positions and labels; between blocks the residual stream is [B, t, D]. The loss is the
    same on every rank.
    """
    rows = {row.name: row for row in model.table}
    sequence = _Sequence(mesh)
    for path, module in model.named_modules():
        own = {name: rows[f"{path}.{name}"] for name in module._parameters if f"{path}.{name}" in rows}
        if not own or any(is_experts(row) for row in own.values()):
            continue  # between blocks ranks hold different tokens, so for experts they are data-parallel ranks
        if not isinstance(module, Viewed):
            raise UserError(
                f"layout.tp={mesh.size()}: {path} is a {type(module).__name__} with its own parameters, which "
                "tensor parallelism cannot split or sum; use meshwright.models.Linear, or layout.tp=1"
            )
        _split_parameters(module, own, model.spec, mesh)
        if isinstance(module, RMSNorm) and own["weight"].dims[0] in TP_SPLITS:
            parts = module.view.read(module)["weight"].shape[0] * mesh.size()
            module.mean_square = SpreadSquares(sequence, parts)
        if isinstance(module, Embedding):
            split = own["weight"].dims[0] in TP_SPLITS
            module.put(VocabularyParallel(own["weight"].shape[0], sequence) if split else OwnPositions(sequence))
        elif isinstance(module, Linear) and _is_row_wise(own):
            module.put(RowParallel(sequence))
            adapter = module.find(Lora)
            if adapter is not None:
                adapter.sum_over_inputs = sequence.sum_over_ranks
                if adapter.dropout is not None:
                    adapter.dropout.part = sequence.rank
    column_wise = (name for name, row in rows.items() if len(row.dims) == 2 and row.dims[0] in TP_SPLITS)
    for path in {name.rsplit(".", 2)[0] for name in column_wise if name.startswith("layers.")}:
        if path.split(".")[1] in model.layers:  # a pipeline rank has only some of them
            parent: Any = model.get_submodule(path)
            if not hasattr(parent, "entry"):
                raise UserError(
                    f"layout.tp={mesh.size()}: {path} is a {type(parent).__name__} with split matrices, so its "
                    "input must first go through `self.entry`, as in meshwright.models.FeedForward; or use "
                    "layout.tp=1"
                )
            parent.entry = GatheredSequence(sequence)
    model.head_split.vocabulary = _VocabularyShare(model.spec.vocab, sequence)


def _split_parameters(module: Viewed, own: dict[str, Parameter], spec: ModelSpec, mesh: DeviceMesh) -> None:
    """Make a module's parameters DTensors on `mesh`, and give the module a view of their local tensors."""
    kept: dict[str, tuple[int, int]] = {}
    dims = {name: split_dim(row, spec, mesh.size()) for name, row in own.items()}
    for name, row in own.items():
        dim = dims[name]
        if dim is None and row.dims[0] == "kv_heads":
            head = mesh.get_local_rank() * spec.num_kv_heads // mesh.size()
            kept[name] = head * spec.head_dim, (head + 1) * spec.head_dim
        parameter = module.get_parameter(name)
        placement = Replicate() if dim is None else Shard(dim)
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    split_dims = {name: dim for name, dim in dims.items() if dim is not None}
    module.view = LocalView(split_dims, kept, f"tp {mesh.size()}")


def _is_row_wise(own: dict[str, Parameter]) -> bool:
    matrix = own.get("weight") or own.get("codes")  # a quantized matrix is stored as codes
    return matrix is not None and not TP_SPLITS.isdisjoint(matrix.dims[1:])


class SpreadSquares:
    """The mean of squares over all heads, of which each rank has some."""

    def __init__(self, sequence: "_Sequence", parts: int) -> None:
        """`parts`: width of all ranks' parts together; if several ranks have the same head, each counts."""
        self.sequence, self.factor = sequence, 1 / parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's part of D] to [..., 1]."""
        return self.sequence.share_sum(x.square().sum(-1, keepdim=True) * self.factor)

    def __repr__(self) -> str:
        return f"over tp {self.sequence.size}"


class RowParallel(Op):
    """A linear layer with a part of the inputs on each rank: the products are summed over ranks and scattered along the
    sequence. The bias is added once, to this rank's tokens."""

    place = OpPosition.SPLIT

    def __init__(self, sequence: "_Sequence") -> None:
        self.sequence = sequence

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[B, T, this rank's part of D] to [B, t, N]."""
        y_BtN = self.sequence.scatter_sum(self.inner.forward(x, {**weights, "bias": None}))
        bias_N = weights.get("bias")
        return y_BtN if bias_N is None else y_BtN + bias_N

    def __repr__(self) -> str:
        return f"row-wise over tp {self.sequence.size}"


class VocabularyParallel(Op):
    """An embedding with a part of the rows on each rank: each looks up its own, and the sum over ranks is scattered."""

    place = OpPosition.SPLIT

    def __init__(self, vocab: int, sequence: "_Sequence") -> None:
        self.vocab, self.sequence = vocab, sequence
        self.first, self.stop = split_range(vocab, sequence.size, sequence.rank)

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Tokens [B, T] to [B, t, D]."""
        known_BT = (x >= 0) & (x < self.vocab)
        assert_on_device(known_BT.all(), "a token is outside the vocabulary")
        here_BT1 = ((x >= self.first) & (x < self.stop))[..., None]
        x_BTD = self.inner.forward((x - self.first).where(here_BT1[..., 0], 0), weights)
        return self.sequence.scatter_sum(x_BTD.where(here_BT1, 0))

    def __repr__(self) -> str:
        return f"rows {self.first}:{self.stop} of the vocabulary, summed over tp {self.sequence.size}"


class OwnPositions(Op):
    """An embedding replicated on every rank: each looks up its own part of the sequence."""

    place = OpPosition.SPLIT

    def __init__(self, sequence: "_Sequence") -> None:
        self.sequence = sequence

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Numbers [..., T] to [..., t, D]."""
        return self.inner.forward(self.sequence.own(x), weights)

    def __repr__(self) -> str:
        return f"this rank's part of the sequence, of tp {self.sequence.size}"


class GatheredSequence:
    """The entry of modules whose first layers are column-wise: every rank gets the whole sequence."""

    def __init__(self, sequence: "_Sequence") -> None:
        self.sequence = sequence

    def __call__(self, x_BtD: torch.Tensor) -> torch.Tensor:
        """[B, t, D] to [B, T, D]."""
        return self.sequence.gather(x_BtD)

    def __repr__(self) -> str:
        return f"sequence gathered over tp {self.sequence.size}"


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
        return collectives.all_gather(x_BtD, self.group, dim=1)

    def scatter_sum(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, t, D] of the sum over ranks; backward, the whole gradient."""
        return collectives.reduce_scatter(x_BTD, self.group, dim=1)

    def share_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, of which each uses its own part; backward, the sum over ranks too."""
        return collectives.entered(collectives.all_reduce(tensor, self.group), self.group)

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return collectives.all_reduce(tensor, self.group)


class _VocabularyShare:
    """This rank's rows of the head, for `HeadSplit`."""

    def __init__(self, vocab: int, sequence: _Sequence) -> None:
        self.vocab = vocab
        self.first, self.stop = split_range(vocab, sequence.size, sequence.rank)
        _, self.rows = split_range(vocab, sequence.size, 0)
        self._sequence = sequence

    def __str__(self) -> str:
        return f"rows {self.first} to {self.stop - 1} of {self.vocab}"

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return collectives.maximum(values, self._sequence.group)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(parts, self._sequence.group)

    def gather_sequence(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self._sequence.gather(x_BTD)

    def own_sequence(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.chunk(self._sequence.size, dim=1)[self._sequence.rank]

    def gather_vocabulary(self, logits_BV: torch.Tensor) -> torch.Tensor:
        parts_BV = F.pad(logits_BV, (0, self.rows - logits_BV.shape[1]))  # the last rank may have fewer
        return collectives.all_gather(parts_BV, self._sequence.group, dim=1)[:, : self.vocab]
