"""Whether context-parallel ranks can share a model of transformers: parts of a row must compute what the whole does.

The proof: two parts, each with two chunks of every row, exchange keys and values in the model's attention. They must
have the whole model's logits and gradients, in rows of one document and of two. So nothing but attention combines
tokens, and attention combines them by keys, values and a mask alone; the same then holds for any number of ranks.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.derive.calls import UnsplitError, close, direction_like, first_float, gradients
from meshwright.derive.derive import Blocks
from meshwright.derive.lockstep import SideBySide, side_by_side
from meshwright.derive.slice_test import GRADIENTS, VALUES
from meshwright.models.foreign_context import ContextShare, context_arguments, row_of, share_context
from meshwright.spec.batch import Batch
from meshwright.spec.foreign import ForeignContext

PARTS = 2

FIRST = 7
"""Tokens of a row's first document, which ends inside a chunk."""


def derive_context(blocks: Blocks) -> ForeignContext:
    """Whether ranks can share the model's rows; with a `problem` if not."""
    if "position_ids" not in inspect.signature(type(blocks.model).forward).parameters:
        return ForeignContext(problem="its forward pass takes no position_ids")
    rows, length = blocks.tokens.shape
    documents_BS = (torch.arange(length) >= FIRST).long().expand(rows, -1)
    try:
        check_context(blocks, None, _logits(blocks, blocks.tokens))
    except UnsplitError as error:
        return ForeignContext(problem=str(error))
    alone = [_logits(blocks, tokens) for tokens in blocks.tokens.split((FIRST, length - FIRST), 1)]
    try:
        check_context(blocks, documents_BS, torch.cat(alone, 1))
    except UnsplitError:
        return ForeignContext(documents=False)
    return ForeignContext()


def _logits(blocks: Blocks, tokens: torch.Tensor) -> torch.Tensor:
    return first_float(blocks.model(input_ids=tokens))


@dataclass
class _Part:
    """What a part computes."""

    share: ContextShare
    logits: torch.Tensor
    parameters: dict[str, nn.Parameter]
    outputs: dict[str, torch.Tensor]


def check_context(blocks: Blocks, documents_BS: torch.Tensor | None, logits: torch.Tensor) -> None:
    """Raise `UnsplitError` unless parts compute these logits, and their gradients."""
    direction = direction_like(logits)
    expected = gradients(logits, direction, dict(blocks.model.named_parameters()))
    try:
        parts = side_by_side(PARTS, lambda sharing: _compute(blocks, documents_BS, sharing))
    except _PartError as error:
        raise UnsplitError(" ".join(str(error).split())[:240]) from error
    places = [part.share.places(part.logits.shape[1], logits.device) for part in parts]
    for part, own in zip(parts, places, strict=True):
        if not close(part.logits.detach(), logits[:, own].detach(), VALUES):
            raise UnsplitError(_first_difference(blocks, part, own))
    loss = torch.stack([(part.logits * direction[:, own]).sum() for part, own in zip(parts, places, strict=True)])
    inputs = {(part.share.part, name): leaf for part in parts for name, leaf in part.parameters.items()}
    computed = gradients(loss, torch.ones_like(loss), inputs)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        each = [computed.get((part, name), torch.zeros_like(gradient)) for part in range(PARTS)]
        if not close(torch.stack(each).sum(0), gradient, GRADIENTS, largest):
            raise UnsplitError(f"over parts of a row the gradient of {name} is not the model's")


def _compute(blocks: Blocks, documents_BS: torch.Tensor | None, sharing: SideBySide) -> _Part:
    """One part's logits, by a copy of the model."""
    model = copy.deepcopy(blocks.model)

    def concatenate(x_BGTK: torch.Tensor) -> torch.Tensor:
        return sharing.gather(x_BGTK.movedim(2, -1)).movedim(-1, 2)

    share = ContextShare(sharing.rank, PARTS, concatenate)
    if problem := share_context(model, share):
        raise UnsplitError(problem)
    own = share.places(blocks.tokens.shape[1] // PARTS, blocks.tokens.device)
    batch = Batch(blocks.tokens[:, own], document_ids=documents_BS)
    with row_of(batch, share), _Outputs(model, blocks.path) as outputs:
        try:
            logits = first_float(model(input_ids=batch.tokens, **context_arguments(batch, share)))
        except Exception as error:  # transformers' code, with a part of the tokens
            name = outputs.entered[-1] if outputs.entered else ""
            kind = type(model.get_submodule(name)).__name__
            where = f"{name} ({kind})" if name else kind
            raise _PartError(f"{where} fails with a part of a row: {type(error).__name__}: {error}") from error
    return _Part(share, logits, dict(model.named_parameters()), outputs.seen)


class _PartError(Exception):
    """transformers' code fails with a part of the tokens; the message names the module."""


class _Outputs:
    """Inside a `with`, notes the output of every module of the blocks, by its name."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.entered: list[str] = []
        """Modules whose forward pass has begun but not ended."""
        modules = {name: module for name, module in model.named_modules() if name.startswith(f"{path}.")}
        self.handles = [module.register_forward_hook(self._noting(name)) for name, module in modules.items()]
        self.handles += [module.register_forward_pre_hook(self._entering(name)) for name, module in modules.items()]

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self.entered.append(name)

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            self.entered.remove(name)
            if isinstance(output, torch.Tensor | tuple):
                self.seen.setdefault(name, first_float(output).detach())

        return note

    def __enter__(self) -> "_Outputs":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _first_difference(blocks: Blocks, part: _Part, places: torch.Tensor) -> str:
    """Names the module that a part does not compute as the whole model does: the first in the order of execution, or,
    if that has no modules within, the one around it."""
    with _Outputs(blocks.model, blocks.path) as whole, torch.no_grad():
        _logits(blocks, blocks.tokens)
    length = blocks.tokens.shape[1]
    for name, ours in part.outputs.items():
        theirs = whole.seen.get(name)
        if theirs is None or ours.dim() != theirs.dim():
            continue
        spread = [dim for dim, size in enumerate(theirs.shape) if size == length and ours.shape[dim] == len(places)]
        if len(spread) == 1 and not close(ours, theirs.index_select(spread[0], places), VALUES):
            parent = name.rpartition(".")[0]
            around = name if parent not in part.outputs or any(blocks.model.get_submodule(name).children()) else parent
            kind = type(blocks.model.get_submodule(around)).__name__
            return f"{around} ({kind}) combines tokens without transformers' attention functions"
    return "parts of a row do not compute the model's logits"
