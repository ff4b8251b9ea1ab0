"""The slice test, the proof of a split: all parts of a module, computed side by side, give its output and gradients.

The parts are made by the code that makes ranks' parts (`models/faces.py`), from slices of the module's parameters.
Which integer attributes a part divides (numbers of heads, widths) is found by trial; the test decides.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.derive.calls import RecordedCall, UnsplitError, close, direction_like, gradients
from meshwright.derive.connect import PossibleSplit, only, runs
from meshwright.derive.lockstep import SideBySide, side_by_side
from meshwright.models.faces import put_faces
from meshwright.models.slots import View, Weights
from meshwright.spec.foreign import SplitModule, SplitParameter

VALUES, GRADIENTS = 1e-6, 1e-5
"""Largest relative differences: transformers computes routers and some norms and softmaxes in float32."""

TRIALS = 400
"""Combinations of attributes that are tried."""

DIVIDED = re.compile(r"head|group|dim|size|inter|channel|split|features|width|_proj|n_embd|qkv|num|ssm", re.I)
KEPT = ("layer_idx", "head_dim", "num_experts", "conv_kernel_size", "out_features", "in_features")
OF_CONFIG = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")


@dataclass
class Expected:
    """What the whole module computes."""

    output: torch.Tensor
    direction: torch.Tensor
    gradients: dict[Any, torch.Tensor]
    """Of parameters by name, of arguments by ("argument", key)."""


class PartView(View):
    """The parameters of a part that has them whole: some only in part, some counted once."""

    def __init__(self, rows: dict[str, tuple[int, int]], once: frozenset[str], first: bool) -> None:
        self.rows, self.once, self.first = rows, once, first

    def read(self, module: nn.Module) -> Weights:
        weights: Weights = dict(module._parameters)
        for name, (start, stop) in self.rows.items():
            weights[name] = weights[name][start:stop]
        return {
            name: weight * 0 if name in self.once and not self.first else weight for name, weight in weights.items()
        }


def expected_of(module: nn.Module, call: RecordedCall) -> Expected:
    """The output and gradients of a call of the whole module."""
    output, leaves = call.on(module)
    direction = direction_like(output)
    inputs: dict[Any, torch.Tensor] = dict(module.named_parameters())
    inputs |= {("argument", key): leaf for key, leaf in leaves.items()}
    return Expected(output.detach(), direction, gradients(output, direction, inputs))


def prove(
    module: nn.Module, call: RecordedCall, candidate: PossibleSplit, parts: int, layers: tuple[int, ...]
) -> SplitModule:
    """The split, with everything that it needs.

    Raises `UnsplitError` with the reason if no part computes what it should.
    """
    if call.buried:
        raise UnsplitError("an argument holds hidden states inside a list")
    whole = expected_of(module, call)
    draft = _draft(module, call, candidate, whole, layers)
    problem, options = "", _options(module, candidate, parts)
    for numbers in itertools.islice(_combinations(options), TRIALS):
        attempt = draft.model_copy(update={"attributes": (*draft.attributes, *numbers)})
        try:
            return _measured(module, call, attempt, parts, whole)
        except UnsplitError as failed:
            problem = str(failed) if not problem or "shape" in problem else problem
        except Exception as error:  # transformers' code, with numbers that do not fit
            problem = problem or " ".join(f"{type(error).__name__}: {error}".split())[:100]
    raise UnsplitError(problem)


def passes(module: nn.Module, call: RecordedCall, split: SplitModule, parts: int) -> None:
    """Raises `UnsplitError` with the reason if a complete split of a module does not pass the slice test."""
    try:
        measured = _measured(module, call, split, parts, expected_of(module, call))
    except UnsplitError:
        raise
    except Exception as error:  # transformers' code, with numbers that do not fit
        raise UnsplitError(" ".join(f"{type(error).__name__}: {error}".split())[:100]) from error
    if wrong := set(measured.partial) ^ set(split.partial):
        raise UnsplitError(f"the gradient of {min(wrong)} is {'' if min(wrong) in measured.partial else 'not '}partial")


def _draft(
    module: nn.Module, call: RecordedCall, candidate: PossibleSplit, whole: Expected, layers: tuple[int, ...]
) -> SplitModule:
    """The split without the attributes that are found by trial."""
    sink = candidate.sink
    with only(module.get_parameter(sink), None):
        direct = expected_of(module, call).gradients
    owner = sink.rpartition(".")[0]
    layer = module.get_submodule(owner)
    single = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    added = {name for name in direct if isinstance(name, str) and name != sink}
    if not single:  # what passes through parameters that only the first part adds is counted once, too
        with contextlib.ExitStack() as stack:
            for name in (sink, *added):
                stack.enter_context(only(module.get_parameter(name), None))
            direct = expected_of(module, call).gradients
    past = {key for key in call.differentiable if ("argument", key) in direct}
    mixed = [key for key in past if not close(direct["argument", key], whole.gradients["argument", key], VALUES)]
    if past and not single:
        raise UnsplitError("its input also reaches its output past the last matrix")
    entered = [("", key) for key in call.differentiable if ("argument", key) in whole.gradients and key not in past]
    if mixed:  # then the gradient is summed where the split matrices read it
        owners = {name.rpartition(".")[0] for name in candidate.places}
        entered = [(path, 0) for path in owners if isinstance(module.get_submodule(path), nn.Linear)]
    once = {name for name in added if not single or name.rpartition(".")[0] == owner}
    parameters = [*_parameters(candidate), _split_parameter(candidate, sink, candidate.sink_dim, candidate.columns)]
    if {one.name for one in parameters} & once:
        raise UnsplitError("a split parameter also reaches the output past the last matrix")
    return SplitModule(
        name="",
        layers=layers,
        parameters=tuple(parameters),
        once=tuple(sorted(once)),
        entered=tuple(sorted(entered, key=str)),
        summed=owner if single else "",
        gathered=candidate.norms,
        attributes=tuple(_sizes(module, parameters, len(candidate.columns))),
    )


def _parameters(candidate: PossibleSplit) -> Iterator[SplitParameter]:
    for name, (dim, indices) in candidate.places.items():
        if name not in candidate.kept:
            yield _split_parameter(candidate, name, dim, indices)
            continue
        if any(one[-1] - one[0] + 1 != len(one) for one in indices):
            raise UnsplitError(f"each part needs rows of {name} that do not follow one another")
        kept = tuple((one[0], one[-1] + 1) for one in indices)
        yield SplitParameter(name=name, kind="kv_heads", dim=dim, kept=kept)


def _split_parameter(candidate: PossibleSplit, name: str, dim: int, indices: list[list[int]]) -> SplitParameter:
    segments = runs(indices)
    if segments is None:
        raise UnsplitError(f"the parts of {name} are not runs of equal length")
    default = "ffn" if set(candidate.kinds.values()) == {"ffn"} else "heads"
    kind: Any = candidate.kinds.get(name, default)
    return SplitParameter(name=name, kind=kind, dim=dim, segments=segments if len(segments) > 1 else ())


def _sizes(module: nn.Module, parameters: Iterable[SplitParameter], parts: int) -> Iterator[tuple[str, str, int, int]]:
    """The attributes that repeat a weight's shape, in torch's layers and transformers' Conv1D."""
    for one in parameters:
        path, _, name = one.name.rpartition(".")
        layer = module.get_submodule(path)
        if name != "weight":
            continue
        local, total = 1, parts
        if one.kept:
            local, total = one.kept[0][1] - one.kept[0][0], module.get_parameter(one.name).shape[0]
        if isinstance(layer, nn.Linear):
            yield path, ("out_features", "in_features")[one.dim], local, total
        elif type(layer).__name__ == "Conv1D":
            yield path, ("nx", "nf")[one.dim], local, total
        elif isinstance(layer, nn.Conv1d) and one.dim == 0:
            yield path, "out_channels", local, total
            if layer.groups > 1:
                yield path, "in_channels", local, total
                yield path, "groups", local, total


def _options(module: nn.Module, candidate: PossibleSplit, parts: int) -> list[tuple[str, str, int, int]]:
    """The attributes that a part may have to divide."""
    fewer = min((count for count in candidate.counts.values() if count < parts), default=1)
    options = []
    for path, inner in module.named_modules():
        if isinstance(inner, nn.Linear | nn.Conv1d):
            continue
        for name, value in vars(inner).items():
            if type(value) is not int or name.startswith("_") or name in KEPT or not DIVIDED.search(name):
                continue
            if name == "num_key_value_groups" and value > 1:
                options.append((path, name, fewer if candidate.counts else 1, parts))
            elif value >= parts and value % parts == 0:
                options.append((path, name, 1, parts))
        config = getattr(inner, "config", None)
        if config is not None and next(inner.parameters(), None) is not None:
            for name in OF_CONFIG:
                value = getattr(config, name, None)
                if type(value) is int and value % parts == 0:
                    options.append((path, f"config.{name}", 1, parts))
    return options


def _combinations(options: list[tuple[str, str, int, int]]) -> Iterator[tuple[tuple[str, str, int, int], ...]]:
    """Subsets, the smallest and the largest first."""
    most = len(options)
    for size in sorted(range(most + 1), key=lambda size: (min(size, most - size), size)):
        yield from itertools.combinations(options, size)


def part_of(module: nn.Module, split: SplitModule, sharing: SideBySide) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """One part of a module, made of a copy, and its parameters by their names in the module."""
    part = copy.deepcopy(module)
    return put_part(part, split, sharing), dict(part.named_parameters())


def put_part(part: nn.Module, split: SplitModule, sharing: SideBySide) -> nn.Module:
    """Turn a module in place into one part of it; returns what takes its place."""
    views: dict[str, View] = {}
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for one in split.parameters:
        path, _, name = one.name.rpartition(".")
        if one.kept:
            rows.setdefault(path, {})[name] = one.kept[sharing.rank]
            continue
        whole = part.get_parameter(one.name)
        sliced = sliced_part(whole.data, one.dim, one.segments, sharing.size, sharing.rank)
        part.get_submodule(path)._parameters[name] = nn.Parameter(sliced)
    once = {name.rpartition(".")[0] for name in split.once}
    for path in rows.keys() | once:
        own = frozenset(name.rpartition(".")[2] for name in split.once if name.rpartition(".")[0] == path)
        views[path] = PartView(rows.get(path, {}), own, sharing.rank == 0)
    return put_faces(part, split, sharing, views)


def sliced_part(whole: torch.Tensor, dim: int, segments: tuple[int, ...], parts: int, part: int) -> torch.Tensor:
    """A part of each segment along a dim, in order."""
    pieces = whole.split(segments or whole.shape[dim], dim)
    return torch.cat([piece.chunk(parts, dim)[part] for piece in pieces], dim).contiguous()


def joined_parts(pieces: list[torch.Tensor], dim: int, segments: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `sliced_part`, from all parts."""
    parts = len(pieces)
    split = [piece.split([size // parts for size in segments] or piece.shape[dim], dim) for piece in pieces]
    return torch.cat([piece for segment in zip(*split, strict=True) for piece in segment], dim)


def _measured(module: nn.Module, call: RecordedCall, split: SplitModule, parts: int, whole: Expected) -> SplitModule:
    """The split with its partial gradients, if all outputs and gradients are right."""

    def compute(sharing: SideBySide) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        part, parameters = part_of(module, split, sharing)
        output, leaves = call.on(part)
        return output, {**parameters, **{("argument", key): leaf for key, leaf in leaves.items()}}

    results = side_by_side(parts, compute)
    for output, _ in results:
        if not close(output.detach(), whole.output, VALUES):
            raise UnsplitError("the parts' outputs do not add up to the module's")
    inputs = {(part, key): leaf for part, (_, leaves) in enumerate(results) for key, leaf in leaves.items()}
    loss = torch.stack([(output * whole.direction).sum() for output, _ in results])
    computed = gradients(loss, torch.ones_like(loss), inputs)
    places = {one.name: one for one in split.parameters if not one.kept}
    largest = max((float(gradient.norm()) for gradient in whole.gradients.values()), default=0.0)
    partial = []
    for key, gradient in whole.gradients.items():
        each = [computed.get((part, key), torch.zeros_like(inputs[part, key])) for part in range(parts)]
        if key in places:
            right = close(joined_parts(each, places[key].dim, places[key].segments), gradient, GRADIENTS, largest)
        elif all(close(one, gradient, GRADIENTS, largest) for one in each):
            right = True
        else:
            right = isinstance(key, str) and close(sum(each), gradient, GRADIENTS, largest)  # pyright: ignore
            partial += [key] if right else []
        if not right:
            raise UnsplitError(
                f"the gradient of {key if isinstance(key, str) else key[1]} is neither whole nor a sum of parts"
            )
    return split.model_copy(update={"partial": tuple(sorted(partial))})
