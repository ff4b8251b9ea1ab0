"""The slice test of a whole model: all its split modules together, as each rank has them.

A module that passes its own test may still be wrong beside another: inside one that is split too, or where both share a
parameter.
"""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.derive.calls import UnsplitError, close, direction_like, first_float, gradients
from meshwright.derive.derive import Blocks
from meshwright.derive.lockstep import SideBySide, side_by_side
from meshwright.derive.slice_test import GRADIENTS, VALUES, joined_parts, put_part
from meshwright.spec.foreign import ForeignSplit, SplitModule


def check_whole(blocks: Blocks, split: ForeignSplit, parts: int, positions: torch.Tensor | None = None) -> None:
    """Raises `UnsplitError` with the reason if the parts' logits or gradients are not the whole model's. `positions`
    [B, T]: of tokens in their documents, which make transformers mask attention."""
    given = {"input_ids": blocks.tokens} | ({} if positions is None else {"position_ids": positions})
    logits = first_float(blocks.model(**given))
    direction = direction_like(logits)
    expected = gradients(logits, direction, dict(blocks.model.named_parameters()))

    def compute(sharing: SideBySide) -> tuple[torch.Tensor, dict[str, nn.Parameter]]:
        part = _part(blocks, split, sharing)
        return first_float(part(**given)), dict(part.named_parameters())

    results = side_by_side(parts, compute)
    if not all(close(output.detach(), logits.detach(), VALUES) for output, _ in results):
        raise UnsplitError("the parts' logits are not the model's")
    inputs = {(part, name): leaf for part, (_, leaves) in enumerate(results) for name, leaf in leaves.items()}
    loss = torch.stack([(output * direction).sum() for output, _ in results])
    computed = gradients(loss, torch.ones_like(loss), inputs)
    places = {f"{path}.{one.name}": one for path, module in _placed(blocks, split) for one in module.parameters}
    partial = {f"{path}.{name}" for path, module in _placed(blocks, split) for name in module.partial}
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        each = [computed.get((part, name), torch.zeros_like(inputs[part, name])) for part in range(parts)]
        place = places.get(name)
        if place is not None and not place.kept:
            right = close(joined_parts(each, place.dim, place.segments), gradient, GRADIENTS, largest)
        elif name in partial:
            right = close(torch.stack(each).sum(0), gradient, GRADIENTS, largest)
        else:
            right = all(close(one, gradient, GRADIENTS, largest) for one in each)
        if not right:
            raise UnsplitError(f"the gradient of {name} is not the model's")


def _placed(blocks: Blocks, split: ForeignSplit) -> Iterator[tuple[str, SplitModule]]:
    """The path of each split module in each block that the model has."""
    layers = len(list(blocks.model.get_submodule(blocks.path).children()))
    for module in split.modules:
        for layer in module.layers:
            if layer < layers:
                yield ".".join(filter(None, (blocks.path, str(layer), module.name))), module


def _part(blocks: Blocks, split: ForeignSplit, sharing: SideBySide) -> nn.Module:
    """One part of a copy of the model."""
    model = copy.deepcopy(blocks.model)
    for path, module in _placed(blocks, split):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        owner.register_module(name, put_part(owner.get_submodule(name), module, sharing))
    return model
