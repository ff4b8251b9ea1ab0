"""Attention masks: causal order, sliding window, padding, documents of a packed row.

Shapes: B batch, T sequence, S keys (cached and new), N = B * T tokens, D documents of all rows.
"""

import functools
from collections.abc import Iterable

import torch

from meshwright.models.batch import TensorBatch
from meshwright.torch_internals import size_varies

MERGED = 128
"""On a CPU, consecutive short documents are attended together under a mask, up to this many tokens: one call per
document would cost more than the masked scores."""


def attention_mask(num_queries: int, num_keys: int, *, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys each of the last `num_queries` positions sees: bool [T, S].

    None if SDPA's own causal rule is equivalent, which keeps its fast path.

    Args:
        window: keys a query sees at most, itself included.
    """
    if window is not None and num_keys <= window:
        window = None
    if window is None and num_queries in (1, num_keys):
        return None
    return _order(num_queries, num_keys, window, device)


def make_masks(windows: Iterable[int | None], batch: TensorBatch) -> "Masks":
    """The mask of a whole batch for each window."""
    length, device, offsets = batch.tokens.shape[1], batch.tokens.device, batch.document_offsets
    masks: Masks = {}
    for window in windows:
        if batch.document_ids is None:
            masks[window] = attention_mask(length, length, window=window, device=device)
        else:
            masks[window] = documents = Documents(batch.document_ids, window=window, offsets=offsets)
            offsets = documents.offsets
    return masks


def document_positions(documents_BT: torch.Tensor) -> torch.Tensor:
    """Each token's position in its document: int64 [B, T], 0 at a document's first token in a row."""
    indices_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return indices_T - torch.where(_starts(documents_BT), indices_T, 0).cummax(1).values


class Documents:
    """The documents of a batch, for attention that never crosses document boundaries.

    A plain class, because FSDP2's mixed precision casts tensors in a block's inputs, tuples and dataclasses included.
    """

    def __init__(self, documents_BT: torch.Tensor, *, window: int | None, offsets: torch.Tensor | None = None):
        """`documents_BT`: integers [B, T]; a document is a run of equal ones in a row. `window`: as in a mask;
        `offsets`: if they are known (`Batch.document_offsets`)."""
        self.documents_BT = documents_BT
        self.window = window
        if offsets is None:
            starts_D = _starts(documents_BT).flatten().nonzero().flatten()
            offsets = torch.cat((starts_D, starts_D.new_full((1,), documents_BT.numel()))).int()
        self.offsets = offsets
        """The start of each document among the N tokens of all rows, and N at the end: int32 [D + 1]."""
        size_varies(self.offsets, 0)  # else compiled blocks would be recompiled for every number

    @functools.cached_property
    def spans(self) -> list[tuple[int, torch.Tensor | None]]:
        """The N tokens cut into (length, mask) spans that do not see each other: a single document (without a mask
        where causal order suffices), or short neighbours."""
        spans, together = [], []
        for length in [*self.offsets.diff().tolist(), MERGED]:
            if together and sum(together) + length > MERGED:
                spans.append((sum(together), self._span_mask(together)))
                together = []
            together.append(length)
        return spans

    def mask(self) -> torch.Tensor:
        """The full mask: bool [B, 1, T, T]."""
        length, device = self.documents_BT.shape[1], self.documents_BT.device
        sees_BTT = self.documents_BT[:, :, None] == self.documents_BT[:, None, :]
        return (sees_BTT & _order(length, length, self.window, device))[:, None]

    def _span_mask(self, lengths: list[int]) -> torch.Tensor | None:
        device = self.documents_BT.device
        if len(lengths) == 1:
            return attention_mask(lengths[0], lengths[0], window=self.window, device=device)
        orders = (_order(length, length, self.window, device).int() for length in lengths)
        return torch.block_diag(*orders).bool()


Mask = torch.Tensor | Documents | None
"""The tokens that each token sees: a mask from `attention_mask` (None: causal order only), or the documents of packed
rows."""

Masks = dict[int | None, Mask]
"""The mask of each window of a model's layers; None: of full attention."""


def _order(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The mask of causal order and sliding window, for the last queries: bool [T, S]."""
    before = num_keys - num_queries
    order_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
    return order_TS if window is None else order_TS.triu(before + 1 - window)


def _starts(documents_BT: torch.Tensor) -> torch.Tensor:
    """Whether a document starts at a token: bool [B, T]."""
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return starts_BT
