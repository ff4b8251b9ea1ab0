"""Context parallelism inside a model of transformers: its attention function gets whole keys and values, and masks with
the positions of a part's own queries.

transformers calls attention, and makes masks, through registries of functions by name. The functions that are
registered here wrap its own: they gather keys and values, and evaluate the model's mask function at a part's positions
in the row. Everything else in a block must work on single tokens, which `derive/context.py` proves.

Shapes: B batch, T tokens of a part, S tokens of the row, G key and value heads, K head_dim.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshwright.models.batch import TensorBatch
from meshwright.models.masks import document_positions
from meshwright.models.partial_attention import own_chunks

PREFIX = "meshwright_context_"
"""Begins the names of the registered functions; the name of transformers' own function follows."""

IMPLEMENTATIONS = ("sdpa", "eager")
"""transformers' functions that compute attention from whole keys and values and a mask of any pattern."""


@dataclass
class ContextShare:
    """A part's tokens of every row, two chunks (`own_chunks`), and the exchange with the other parts."""

    part: int
    parts: int
    concatenate: Callable[[torch.Tensor], torch.Tensor]
    """The parts' tensors [B, G, T, K] in order along dim 2; backward, the sum of the parts' gradients of this part."""
    splits: bool = True
    """Whether batches hold parts of rows; False while a check reads whole ones."""

    def places(self, tokens: int, device: torch.device) -> torch.Tensor:
        """The positions of this part's tokens, T of them, in the row: int64 [T]."""
        chunks = torch.arange(tokens * self.parts, device=device).chunk(2 * self.parts)
        return torch.cat([chunks[chunk] for chunk in own_chunks(self.part, self.parts)])

    def gather(self, x_BGTK: torch.Tensor) -> torch.Tensor:
        """The parts' keys or values as those of the whole row, in its order: [B, G, S, K]."""
        chunks = self.concatenate(x_BGTK).chunk(2 * self.parts, 2)
        order = [chunk for part in range(self.parts) for chunk in own_chunks(part, self.parts)]
        return torch.cat([chunks[order.index(chunk)] for chunk in range(len(chunks))], 2)


_SHARES: WeakKeyDictionary[nn.Module, ContextShare] = WeakKeyDictionary()
"""Of each module of a model, because recomputed blocks run outside the model's forward pass."""


@dataclass
class _Row:
    """The positions of a forward pass, within documents if rows have several."""

    queries: torch.Tensor
    """int64 [B, T]."""
    keys: torch.Tensor
    """int64 [B, S]."""
    same: torch.Tensor | None
    """Bool [B, T, S]: whether query and key belong to the same document; None if a row is one document."""


_ROW: ContextVar[_Row | None] = ContextVar("_ROW", default=None)


def share_context(model: nn.Module, share: ContextShare) -> str:
    """Let `model` compute a part of every row. Returns the reason if its attention cannot be wrapped, and "" else."""
    _register()
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    names = {config._attn_implementation for config in configs.values() if hasattr(config, "_attn_implementation")}
    if not names or not names <= {*IMPLEMENTATIONS}:
        return f"transformers computes its attention by {', '.join(sorted(map(str, names))) or 'other means'}"
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = PREFIX + config._attn_implementation
    for module in model.modules():
        _SHARES[module] = share
    return ""


def context_arguments(batch: TensorBatch, share: ContextShare) -> dict[str, torch.Tensor]:
    """The arguments of transformers' forward pass for a part of a batch's rows.

    The mask of ones has the length of whole rows. With it transformers does not look for documents in the positions,
    which it would find where a part's chunks meet.
    """
    rows, tokens = batch.tokens.shape
    positions_BT = batch.position_ids
    if positions_BT is None:
        documents_BS, places_T = batch.document_ids, share.places(tokens, batch.tokens.device)
        whole_BS = None if documents_BS is None else document_positions(documents_BS)
        positions_BT = places_T.expand(rows, -1) if whole_BS is None else whole_BS[:, places_T]
    ones_BS = torch.ones(rows, tokens * share.parts, dtype=torch.long, device=batch.tokens.device)
    return {"position_ids": positions_BT, "attention_mask": ones_BS}


@contextmanager
def row_of(batch: TensorBatch, share: ContextShare) -> Iterator[None]:
    """Inside, masks are made for this batch."""
    places_T = share.places(batch.tokens.shape[1], batch.tokens.device)
    if (documents_BS := batch.document_ids) is None:
        keys_BS = torch.arange(len(places_T) * share.parts, device=places_T.device)[None]
        row = _Row(places_T[None], keys_BS, None)
    else:
        keys_BS = document_positions(documents_BS)
        own_BT = documents_BS[:, places_T]
        row = _Row(keys_BS[:, places_T], keys_BS, own_BT[:, :, None] == documents_BS[:, None, :])
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


@functools.cache
def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS  # heavy and optional
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    for name in IMPLEMENTATIONS:
        FUNCTIONS.register(PREFIX + name, functools.partial(_attend, FUNCTIONS.get(name)))
        MASKS.register(PREFIX + name, functools.partial(_mask, name, MASKS[name]))


def _attend(
    theirs: Callable[..., Any] | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **options: Any,
) -> Any:
    """transformers' attention function, with the row's keys and values; `theirs` is None for the model's own."""
    share = _SHARES[module]
    if share.splits:
        if key.shape[:-1] == value.shape[:-1]:
            widths = key.shape[-1], value.shape[-1]
            key, value = share.gather(torch.cat((key, value), -1)).split(widths, -1)
        else:
            key, value = share.gather(key), share.gather(value)
    attend = theirs or _of_own_file(module)
    return attend(module, query, key, value, attention_mask, *args, **options)


def _of_own_file(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of the file that defines a module's class."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))


def _mask(
    name: str,
    theirs: Callable[..., Any],
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor | None:
    """The mask of a part's queries and the row's keys, [B, 1, T, S]: bool for sdpa, and added to scores for eager."""
    row = _ROW.get()
    if row is None:  # whole rows
        return theirs(*args, mask_function=mask_function, dtype=dtype, **options)
    rows = torch.arange(len(row.queries), device=row.queries.device)[:, None, None, None]
    seen_B1TS = mask_function(rows, torch.zeros_like(rows), row.queries[:, None, :, None], row.keys[:, None, None])
    if row.same is not None:
        seen_B1TS = seen_B1TS & row.same[:, None]
    if name == "sdpa":
        return seen_B1TS
    zero = torch.zeros((), dtype=dtype, device=seen_B1TS.device)
    return torch.where(seen_B1TS, zero, torch.finfo(dtype).min)
