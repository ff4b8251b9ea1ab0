"""The part of each parameter that a rank keeps; used by planner and engine."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.spec.foreign import ForeignModel
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec, Parameter

DELTA_SPLITS = frozenset({"delta_qkv", "delta_qkvz", "delta_values", "delta_heads", "delta_gates"})
"""Those of the gated delta rule, by heads."""

TP_SPLITS = DELTA_SPLITS | {"heads", "gated_heads", "query_heads", "kv_heads", "v_heads", "ffn", "shared_ffn", "vocab"}
"""Named dims that tensor-parallel ranks split. A weight's dims are (out, in): splitting the out dim makes it
column-wise parallel, the in dim row-wise."""


def split_dim(row: Parameter, model: ModelSpec, tp: int) -> int | None:
    """Index of the dim of `row` that `tp` ranks split; None if each of them keeps the whole.

    If a model has fewer key and value heads than there are ranks, every rank keeps all of them and computes the one
    that its query heads need.
    """
    for index, dim in enumerate(row.dims):
        if dim in TP_SPLITS:
            if model.foreign is not None:  # its table has only dims that are split, and the vocabulary
                return None if tp == 1 or dim == "vocab" else index
            return None if tp == 1 or (dim == "kv_heads" and model.num_kv_heads % tp) else index
    return None


@dataclass(frozen=True)
class Arrangement:
    """The order in which ranks store the dim of a parameter that they split run by run (`Parameter.segments`): first
    all of the first rank's part, then the second's. Files and checkpoints have the model's own order."""

    dim: int
    runs: tuple[tuple[int, int], ...]
    """(start, stop) in the model's order, in the stored order."""

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs that make up [start, stop) of the stored order."""
        position = 0
        for first, last in self.runs:
            begin, end = max(start, position), min(stop, position + last - first)
            if begin < end:
                yield first + begin - position, first + end - position
            position += last - first


def arrangements(table: Iterable[Parameter], model: ModelSpec, tp: int) -> dict[str, Arrangement]:
    """The arrangement of each parameter that has one, by name."""
    by_name = {}
    for row in table:
        dim = split_dim(row, model, tp)
        if row.segments and dim is not None:
            begins = list(pairwise(accumulate(row.segments, initial=0)))
            runs = [
                (first + r * (last - first) // tp, first + (r + 1) * (last - first) // tp)
                for r in range(tp)
                for first, last in begins
            ]
            by_name[row.name] = Arrangement(dim, tuple(runs))
    return by_name


def shard_dim(row: Parameter, model: ModelSpec, layout: LayoutSpec) -> int:
    """Index of the dim that ZeRO's ranks split: the rows that remain after tensor parallelism. If these are unequal (a
    vocabulary that `tp` does not divide), the columns, because torch can locate pieces of a dim that is split twice
    only if they are equal. Of three dims, the first that they divide."""
    dim = split_dim(row, model, layout.tp)
    if len(row.shape) == 3:
        return expert_shard_dim(row.shape, layout.shard, split=dim == 0)
    return 1 if dim == 0 and row.shape[0] % layout.tp else 0


def is_experts(row: Parameter) -> bool:
    """Whether the parameter holds a matrix of every expert of a layer, of our families or shared by expert-parallel
    ranks, whose ranks are not those of other parameters."""
    return row.dims[0] == "experts" and len(row.dims) == 3 and row.dims[-1] not in ("in", "ffn")


def expert_shard_dim(shape: tuple[int, ...], shards: int, *, split: bool) -> int:
    """Index of the dim along which this many ranks (ZeRO) split the stacked expert matrices: the first that they
    divide, because there are often more ranks than experts. With `split`, not the expert dim, which is already split
    over ranks."""
    return next((dim for dim in range(int(split), 3) if shape[dim] % shards == 0), 0)


def split_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's part of a dim of `size`: equal parts, rounded up; the last ones are shorter."""
    part = -(-size // ranks)
    return min(rank * part, size), min((rank + 1) * part, size)


def stage_copies(model: ModelSpec) -> tuple[str, ...]:
    """The parameters that the first and the last pipeline stage both have, as a tied embedding."""
    if model.foreign is not None:
        return () if model.foreign.cuts is None else model.foreign.cuts.copied
    return ("tok_embeddings.weight",) if model.tied_embeddings else ()


def rows_of_layers(table: Iterable[Parameter], model: ModelSpec, layers: Container[int]) -> Iterator[Parameter]:
    """The rows that a pipeline rank with these layers keeps: embeddings go with the first layer, norm and head with the
    last. A tied head is the embedding; the last layer's rank has a copy of it."""
    if model.foreign is not None:
        yield from _foreign_rows(table, model.foreign, model.num_layers, layers)
        return
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


def _foreign_rows(
    table: Iterable[Parameter], foreign: ForeignModel, count: int, layers: Container[int]
) -> Iterator[Parameter]:
    first, last = 0 in layers, count - 1 in layers
    blocks, cuts = f"{foreign.blocks}.", foreign.cuts
    for row in table:
        if row.name.startswith(blocks):
            if int(row.name.removeprefix(blocks).split(".")[0]) in layers:
                yield row
        elif cuts is None or row.name in cuts.copied:
            yield from [row] if first or last else []
        elif last if cuts.is_after(row.name) else first:
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
        splits = ((dim, layout.tp, tp_rank), (shard_dim(row, model, layout), layout.shard, shard_rank))
    for index, ranks, rank in splits:
        if index is not None:
            start, stop = split_range(shape[index], ranks, rank)
            shape[index] = stop - start
    return tuple(shape)
