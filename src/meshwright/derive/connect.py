"""What of a module's parameters belongs together: gradient connectivity.

1. Sink: a matrix W without which every other matrix has no gradient (o_proj, down_proj).
2. Connect: with only slice j of W's input dim, the nonzero rows of another parameter's gradient are what j needs.
3. Components: the slices that share rows of a parameter belong together: as heads, or each alone, as in feed-forward.
4. Join: parameters with equal numbers of components, the largest first, are split together; the rest stay whole, or
   each part needs only some of their rows.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from meshwright.derive.calls import RecordedCall, direction_like, gradients

Place = tuple[str, int]
"""A parameter's name, and one of its dims."""


@dataclass
class PossibleSplit:
    """A possible split of a module: the indices of each part."""

    sink: str
    sink_dim: int
    columns: list[list[int]]
    """Of the sink's dim, for each part."""
    places: dict[str, tuple[int, list[list[int]]]]
    """Parameter -> the dim that is split, and each part's indices; parts of one that is `kept` may overlap."""
    kinds: dict[str, str]
    """Parameter -> heads, kv_heads or ffn."""
    kept: set[str] = field(default_factory=set)
    """The parameters that stay whole, of which each part needs its indices."""
    counts: dict[str, int] = field(default_factory=dict)
    """Parameter -> its number of components, if it is kept or whole."""
    norms: tuple[str, ...] = ()
    """Norms that span the parts."""

    @property
    def size(self) -> int:
        """Number of split parameters."""
        return len(self.places) - len(self.kept)


def candidates(
    module: nn.Module, call: RecordedCall, parts: int, taken: Collection[str] = ()
) -> Iterator[PossibleSplit]:
    """The possible splits of a module by its sinks, the largest first; then those in which norms span parts.

    `taken`: modules within that are split already.
    """
    free = [name for name, _ in module.named_parameters() if not name.startswith(tuple(f"{path}." for path in taken))]
    splits = [one for sink in sinks(module, call, free) for one in _splits(module, call, sink, parts)]
    yield from sorted(splits, key=lambda one: -_numel(module, one))
    norms = tuple(_norms(module))
    with elementwise(module, norms):
        splits = [one for sink in sinks(module, call, free) for one in _splits(module, call, sink, parts)]
    for one in sorted(splits, key=lambda one: -_numel(module, one)):
        one.norms = tuple(path for path in norms if f"{path}.weight" in one.places)
        for name in list(one.places):
            if name.rpartition(".")[0] in one.norms:
                del one.places[name], one.kinds[name]
                one.kept.discard(name)
        if one.norms and one.places:
            yield one


def sinks(module: nn.Module, call: RecordedCall, free: Collection[str]) -> list[str]:
    """The matrices without which every other one, of those that are `free`, has no gradient."""
    parameters = dict(module.named_parameters())
    output, _ = call.on(module)
    direction = direction_like(output)
    live = gradients(output, direction, parameters)
    matrices = [name for name in live if parameters[name].dim() >= 2 and not name.endswith("bias") and name in free]
    names = []
    for name in matrices:
        with only(parameters[name], None):
            left = gradients(call.on(module)[0], direction, parameters)
        others = [other for other in matrices if other != name]
        if others and not any(other in left for other in others):
            names.append(name)
    return names


@contextlib.contextmanager
def only(matrix: torch.Tensor, slice_: tuple[int, int] | None) -> Iterator[None]:
    """Keep one (dim, index) of a matrix, or nothing, and zero the rest."""
    whole = matrix.detach().clone()
    matrix.data.zero_()
    if slice_ is not None:
        matrix.data.select(*slice_).copy_(whole.select(*slice_))
    try:
        yield
    finally:
        matrix.data.copy_(whole)


@contextlib.contextmanager
def elementwise(module: nn.Module, norms: Iterable[str]) -> Iterator[None]:
    """Replace the norms' outputs by products of input and weight, which spread nothing."""

    def product(norm: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        weight = norm.get_parameter("weight")
        return args[0] * weight if args and args[0].shape[-1:] == weight.shape else output

    handles = [module.get_submodule(path).register_forward_hook(product) for path in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _norms(module: nn.Module) -> Iterator[str]:
    for path, inner in module.named_modules():
        if path and "norm" in type(inner).__name__.lower() and inner._parameters.get("weight") is not None:
            yield path


def _numel(module: nn.Module, candidate: PossibleSplit) -> int:
    parameters = dict(module.named_parameters())
    return sum(parameters[name].numel() for name in candidate.places if name not in candidate.kept)


def input_dims(module: nn.Module, sink: str) -> tuple[int, ...]:
    """The dims of a matrix that may be its input's."""
    owner, matrix = module.get_submodule(sink.rpartition(".")[0]), module.get_parameter(sink)
    if isinstance(owner, nn.Linear):
        return (1,)
    if type(owner).__name__ == "Conv1D":
        return (0,)
    return tuple(range(1, 3)) if matrix.dim() == 3 else (matrix.dim() - 1,)


def _splits(module: nn.Module, call: RecordedCall, sink: str, parts: int) -> Iterator[PossibleSplit]:
    for dim in input_dims(module, sink):
        patterns = connect(module, call, sink, dim)
        if (split := join(module, patterns, sink, dim, parts)) is not None:
            yield split


def connect(module: nn.Module, call: RecordedCall, sink: str, dim: int) -> dict[Place, torch.Tensor]:
    """For each other parameter and dim, [slices of the sink, indices]: whether a slice needs an index."""
    parameters = dict(module.named_parameters())
    matrix = parameters[sink]
    direction = direction_like(call.on(module)[0])
    patterns: dict[Place, torch.Tensor] = {}
    for index in range(matrix.shape[dim]):
        with only(matrix, (dim, index)):
            slopes = gradients(call.on(module)[0], direction, parameters)
        for name, gradient in slopes.items():
            if name == sink:
                continue
            for axis in range(gradient.dim()):
                rows = gradient.movedim(axis, 0).flatten(1).any(1) if gradient.dim() > 1 else gradient != 0
                empty = torch.zeros(matrix.shape[dim], len(rows), dtype=torch.bool)
                patterns.setdefault((name, axis), empty)[index] = rows
    return patterns


def components(pattern: torch.Tensor) -> list[list[int]]:
    """The slices that share an index, in the order of their first; slices without indices are left out."""
    parent = list(range(len(pattern)))

    def root(one: int) -> int:
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    for column in pattern.t():
        for other, one in pairwise(column.nonzero().flatten().tolist()):
            parent[root(one)] = root(other)
    groups: dict[int, list[int]] = {}
    for one in range(len(pattern)):
        if pattern[one].any():
            groups.setdefault(root(one), []).append(one)
    return sorted(groups.values())


def join(
    module: nn.Module, patterns: dict[Place, torch.Tensor], sink: str, dim: int, parts: int
) -> PossibleSplit | None:
    """The largest set of parameters that are split together; None if there is none."""
    split = {place: components(pattern) for place, pattern in patterns.items()}
    split = {place: groups for place, groups in split.items() if len(groups) > 1 and _disjoint(patterns[place], groups)}
    chosen: list[Place] = []
    shares: list[list[int]] | None = None
    left: list[Place] = []
    for place in sorted(split, key=lambda place: -module.get_parameter(place[0]).numel()):
        if any(place[0] == name for name, _ in chosen):
            continue
        joined = _shares(torch.cat([patterns[one] for one in (*chosen, place)], 1), parts)
        if joined is None:
            left.append(place)
        else:
            chosen.append(place)
            shares = joined
    if shares is None:
        return None
    possible = PossibleSplit(sink, dim, shares, {}, {})
    columns = len(patterns[chosen[0]])
    alone = all(len(split[place]) == columns for place in chosen)
    for name, axis in chosen:
        possible.places[name] = axis, _indices(patterns[name, axis], shares)
        fewer = patterns[name, axis].shape[1] < columns and len(split[name, axis]) == min(map(len, split.values()))
        possible.kinds[name] = "ffn" if alone else "kv_heads" if fewer else "heads"
    for name, axis in left:
        indices = _indices(patterns[name, axis], shares)
        possible.counts[name] = len(split[name, axis])
        if (
            name not in possible.places
            and axis == 0
            and all(len(one) < patterns[name, axis].shape[1] for one in indices)
        ):
            possible.places[name], possible.kinds[name] = (axis, indices), "kv_heads"
            possible.kept.add(name)
    return possible


def _disjoint(pattern: torch.Tensor, groups: list[list[int]]) -> bool:
    """Whether no two components need an index."""
    needed = [pattern[group].any(0) for group in groups]
    return int(sum(one.sum() for one in needed)) == int(torch.stack(needed).any(0).sum())


def _shares(pattern: torch.Tensor, parts: int) -> list[list[int]] | None:
    """Each part's slices, as whole components; None if these cannot be dealt out evenly."""
    groups = components(pattern)
    if len(groups) % parts or len({len(group) for group in groups}) > 1:
        return None
    each = len(groups) // parts
    return [sorted(itertools.chain(*groups[part * each : (part + 1) * each])) for part in range(parts)]


def _indices(pattern: torch.Tensor, shares: list[list[int]]) -> list[list[int]]:
    return [pattern[share].any(0).nonzero().flatten().tolist() for share in shares]


def runs(indices: list[list[int]]) -> tuple[int, ...] | None:
    """The sizes of the runs, each split evenly over the parts in order; None if the indices are not so."""
    owner = {index: part for part, share in enumerate(indices) for index in share}
    total = sum(map(len, indices))
    if len(owner) != total or set(owner) != set(range(total)):
        return None
    lengths: list[tuple[int, int]] = []
    for index in range(total):
        if lengths and lengths[-1][0] == owner[index]:
            lengths[-1] = owner[index], lengths[-1][1] + 1
        else:
            lengths.append((owner[index], 1))
    parts = len(indices)
    sizes = []
    for start in range(0, len(lengths), parts):
        run = lengths[start : start + parts]
        if [part for part, _ in run] != list(range(parts)) or len({length for _, length in run}) > 1:
            return None
        sizes.append(sum(length for _, length in run))
    return tuple(sizes)
