"""The part of each parameter that a rank keeps; used by planner and engine."""

from collections.abc import Container, Iterable, Iterator

from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec, Parameter

TP_SPLITS = frozenset({"heads", "kv_heads", "v_heads", "ffn", "shared_ffn", "vocab"})
"""Named dims that tensor-parallel ranks split. A weight's dims are (out, in): splitting the out dim makes it
column-wise parallel, the in dim row-wise."""


def split_dim(row: Parameter, model: ModelSpec, tp: int) -> int | None:
    """Index of the dim of `row` that `tp` ranks split; None if each of them keeps the whole.

    If a model has fewer key and value heads than there are ranks, every rank keeps all of them and computes the one
    that its query heads need.
    """
    for index, dim in enumerate(row.dims):
        if dim in TP_SPLITS:
            return None if tp == 1 or (dim == "kv_heads" and model.num_kv_heads % tp) else index
    return None


def shard_dim(row: Parameter, model: ModelSpec, tp: int) -> int:
    """Index of the dim that ZeRO's ranks split: the rows that remain after tensor parallelism. If these are unequal (a
    vocabulary that `tp` does not divide), the columns, because torch can locate pieces of a dim that is split twice
    only if they are equal."""
    dim = split_dim(row, model, tp)
    return 1 if dim == 0 and row.shape[0] % tp else 0


def is_experts(row: Parameter) -> bool:
    """Whether the parameter holds a matrix of every expert of a layer."""
    return len(row.dims) == 3


def expert_shard_dim(shape: tuple[int, ...], shards: int, *, split: bool) -> int:
    """Index of the dim along which this many ranks (ZeRO) split the stacked expert matrices: the first that they
    divide, because there are often more ranks than experts. With `split`, not the expert dim, which is already split
    over ranks."""
    return next((dim for dim in range(int(split), 3) if shape[dim] % shards == 0), 0)


def split_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's part of a dim of `size`: equal parts, rounded up; the last ones are shorter."""
    part = -(-size // ranks)
    return min(rank * part, size), min((rank + 1) * part, size)


def rows_of_layers(table: Iterable[Parameter], model: ModelSpec, layers: Container[int]) -> Iterator[Parameter]:
    """The rows that a pipeline rank with these layers keeps: embeddings go with the first layer, norm and head with the
    last. A tied head is the embedding; the last layer's rank has a copy of it."""
    first, last = 0 in layers, model.num_layers - 1 in layers
    ends = {
        "tok_embeddings": first or (last and model.tied_embeddings),
        "pos_embeddings": first,
        "norm": last,
        "output": last,
    }
    for row in table:
        module, layer, *_ = row.name.split(".")
        if int(layer) in layers if module == "layers" else ends[module]:
            yield row


def kept_shape(
    row: Parameter, model: ModelSpec, layout: LayoutSpec, *, tp_rank: int, shard_rank: int
) -> tuple[int, ...]:
    """Shape of a rank's stored part of a parameter, of its gradient and of each of its moments, given the rank's index
    on the axes `tp` (of `layout.tp`) and `shard` (of `layout.shard`)."""
    shape = list(row.shape)
    if is_experts(row):
        place = shard_rank * layout.tp + tp_rank
        dim = expert_shard_dim(row.shape, layout.expert_shard, split=layout.ep > 1)
        splits = ((0, layout.ep, place % layout.ep), (dim, layout.expert_shard, place // layout.ep))
    else:
        dim = split_dim(row, model, layout.tp)
        splits = ((dim, layout.tp, tp_rank), (shard_dim(row, model, layout.tp), layout.shard, shard_rank))
    for index, ranks, rank in splits:
        if index is not None:
            start, stop = split_range(shape[index], ranks, rank)
            shape[index] = stop - start
    return tuple(shape)
