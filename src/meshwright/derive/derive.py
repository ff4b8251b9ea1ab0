"""The derivation of a model's split: every distinct kind of block, module by module, the deepest first."""

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.derive.calls import RecordedCall, UnsplitError, record, rounds_in_float32
from meshwright.derive.connect import candidates
from meshwright.derive.slice_test import passes, prove
from meshwright.models.widen import Float64InPlaceOfFloat32
from meshwright.spec.foreign import ForeignSplit, SplitModule

MOST_CANDIDATES = 6
"""Possible splits of a module that are tested."""


@dataclass
class Blocks:
    """A model that is small enough to be computed, and its blocks."""

    model: nn.Module
    path: str
    """Name of the list of blocks."""
    kinds: dict[int, tuple[int, ...]]
    """The first block of each kind -> all blocks of it, in the large model."""
    tokens: torch.Tensor

    def block(self, layer: int) -> nn.Module:
        """A block."""
        return self.model.get_submodule(f"{self.path}.{layer}")


@dataclass
class Derived:
    """The result for all kinds of blocks."""

    modules: list[SplitModule] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    """Matrix -> the reason why it stays whole."""


def derive_split(blocks: Blocks, parts: int) -> ForeignSplit:
    """The split of a model over this many parts."""
    modules = {
        (layer, name): module
        for layer in blocks.kinds
        for name, module in blocks.block(layer).named_modules()
        if sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2
    }
    calls = record(lambda: blocks.model(input_ids=blocks.tokens), modules)
    derived = Derived()
    for layer in blocks.kinds:
        own = {name: call for (number, name), call in calls.items() if number == layer}
        _derive_block(blocks, layer, own, parts, derived)
    notes = tuple(dict.fromkeys(_disagreements(blocks, derived)))
    return ForeignSplit(
        tp=parts,
        modules=tuple(derived.modules),
        whole=tuple(sorted(derived.whole.items())),
        notes=notes,
        rounds=_rounds(blocks),
    )


def _rounds(blocks: Blocks) -> bool:
    with Float64InPlaceOfFloat32():
        return rounds_in_float32(lambda: blocks.model(input_ids=blocks.tokens))


def recheck(blocks: Blocks, split: ForeignSplit, parts: int) -> tuple[list[int], dict[str, str]]:
    """The numbers of the modules that pass the slice test in another model, and the matrices of those that do not, with
    the reason."""
    keys = {(module.layers[0], module.name): number for number, module in enumerate(split.modules)}
    modules = {(layer, name): blocks.block(layer).get_submodule(name) for layer, name in keys}
    calls = record(lambda: blocks.model(input_ids=blocks.tokens), modules)
    passed, lost = [], {}
    for key, number in keys.items():
        module = split.modules[number]
        try:
            passes(modules[key], calls[key], module, parts)
            passed.append(number)
        except UnsplitError as error:
            for one in module.parameters:
                lost[f"{module.name}.{one.name}"] = f"its split does not hold for other widths ({error})"
    return passed, lost


BY_ROWS, BY_COLUMNS = ("colwise", "packed_colwise"), ("rowwise", "packed_rowwise")


def _disagreements(blocks: Blocks, derived: Derived) -> Iterator[str]:
    """Where transformers' own plan splits another dim of a matrix than is derived."""
    theirs: dict[str, str] = getattr(blocks.model, "tp_plan", None) or {}
    dims = {
        (layer, f"{module.name}.{one.name}".removeprefix(".")): one.dim
        for module in derived.modules
        for layer in module.layers
        for one in module.parameters
        if not one.kept
    }
    for layer in blocks.kinds:
        for name, parameter in blocks.block(layer).named_parameters():
            general = re.sub(r"\.\d+(?=\.|$)", ".*", f"{blocks.path}.{layer}.{name}")
            word = theirs.get(general) or theirs.get(general.rpartition(".")[0]) or ""
            planned = {**dict.fromkeys(BY_ROWS, parameter.dim() - 2), **dict.fromkeys(BY_COLUMNS, parameter.dim() - 1)}
            if parameter.dim() < 2 or word not in planned:
                continue
            dim = dims.get((layer, name))
            if dim is None:
                yield f"{general} is {word} there, and whole here"
            elif dim != planned[word]:
                yield f"{general} is {word} there, and split along dim {dim} here"


def _derive_block(blocks: Blocks, layer: int, calls: dict[str, RecordedCall], parts: int, derived: Derived) -> None:
    block, layers = blocks.block(layer), blocks.kinds[layer]
    reasons: dict[str, str] = {}
    taken: list[str] = []
    for name in sorted(calls, key=lambda name: (not name, -name.count("."))):
        if name and any(other.startswith(f"{name}.") for other in taken):
            continue
        try:
            split = split_module(block.get_submodule(name), calls[name], parts, layers, () if name else taken)
        except UnsplitError as failed:
            reasons[name] = str(failed)
            continue
        taken.append(name)
        derived.modules.append(split.model_copy(update={"name": name}))
    split = [(one.name, row.name) for one in derived.modules if one.layers == layers for row in one.parameters]
    split_names = {f"{module}.{name}".removeprefix(".") for module, name in split}
    for name, parameter in block.named_parameters():
        if parameter.dim() >= 2 and name not in split_names:
            within = [reason for module, reason in reasons.items() if module and name.startswith(f"{module}.")]
            inside = any(name.startswith(f"{module}.") for module in taken if module)
            reason = "ranks share it" if inside else within[0] if within else "no matrix follows it in its module"
            derived.whole[f"{blocks.path}.*.{name}"] = reason


def split_module(
    module: nn.Module, call: RecordedCall, parts: int, layers: tuple[int, ...], taken: Collection[str] = ()
) -> SplitModule:
    """The largest split of one module that passes the slice test; raises `UnsplitError` with the reason if none does.

    `taken`: modules within that are split already.
    """
    problem = ""
    for candidate in itertools.islice(candidates(module, call, parts, taken), MOST_CANDIDATES):
        try:
            return prove(module, call, candidate, parts, layers)
        except UnsplitError as failed:
            problem = problem or str(failed)
    raise UnsplitError(problem or f"nothing in it can be dealt out evenly to {parts} ranks")
