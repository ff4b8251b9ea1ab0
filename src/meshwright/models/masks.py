"""Attention masks: causal order, sliding window, padding, documents of a packed row.

Shapes: B batch, T sequence, S keys (cached and new), N = B * T tokens, D documents of all rows.
"""

import functools

import torch

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
    keys_S = torch.arange(num_keys, device=device)
    queries_T1 = keys_S[num_keys - num_queries :, None]
    mask = keys_S <= queries_T1
    if window is not None:
        mask = mask & (keys_S > queries_T1 - window)
    return mask


def document_positions(documents_BT: torch.Tensor) -> torch.Tensor:
    """Each token's position in its document: int64 [B, T], 0 at a document's first token in a row."""
    indices_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return indices_T - torch.where(_starts(documents_BT), indices_T, 0).cummax(1).values


class Documents:
    """The documents of a batch, for attention that never crosses document boundaries.

    A plain class, because FSDP2's mixed precision casts tensors in a block's inputs, tuples and dataclasses included.
    """

    def __init__(self, documents_BT: torch.Tensor, *, window: int | None):
        """`documents_BT`: integers [B, T]; a document is a run of equal ones in a row. `window`: as in a mask."""
        self.documents_BT = documents_BT
        self.window = window
        starts_D = _starts(documents_BT).flatten().nonzero().flatten()
        self.offsets = torch.cat((starts_D, starts_D.new_tensor([documents_BT.numel()]))).int()
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
        sees_BTT = self.documents_BT[:, :, None] == self.documents_BT[:, None, :]
        return (sees_BTT & self._order(self.documents_BT.shape[1]))[:, None]

    def _span_mask(self, lengths: list[int]) -> torch.Tensor | None:
        if len(lengths) == 1:
            device = self.documents_BT.device
            return attention_mask(lengths[0], lengths[0], window=self.window, device=device)
        return torch.block_diag(*(self._order(length).int() for length in lengths)).bool()

    def _order(self, length: int) -> torch.Tensor:
        """The mask of causal order and sliding window: bool [T, T]."""
        order_TT = torch.ones(length, length, dtype=torch.bool, device=self.documents_BT.device).tril()
        return order_TT if self.window is None else order_TT.triu(1 - self.window)


def _starts(documents_BT: torch.Tensor) -> torch.Tensor:
    """Whether a document starts at a token: bool [B, T]."""
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return starts_BT
