"""The gated delta rule under context parallelism: ranks pass what a run of tokens does to a state, not the tokens.

Each rank holds one or two runs of consecutive tokens of every sequence. A run maps the state S that enters it to
M S + U (`models/delta_rule.py`), and such maps compose: every rank computes M and U of its own runs, all are gathered,
and each rank composes those before its own. The convolution also gets the last tokens of the run before.

Shapes: B batch, R runs of a rank, B' = R B, T tokens of a run, P runs of all ranks, H heads, K key width, V value
width, W channels.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.comm import collectives
from meshwright.models.delta_rule import Heads, cut, outputs, scan
from meshwright.models.gated_delta import Pieces
from meshwright.models.masks import Documents, Mask


class RunsOfRanks(Pieces):
    """A rank's runs, of those of all ranks."""

    def __init__(self, group: dist.ProcessGroup, runs: tuple[int, ...]) -> None:
        """`runs`: numbers, in the sequence, of this rank's runs: one of N, or the r-th from either end of 2 N."""
        self.group, self.runs = group, runs
        self.total = len(runs) * group.size()
        self._rule: Any = torch.compiler.disable(self._computed)
        self._ahead: Any = torch.compiler.disable(self._before)

    def apart(self, x_BT: torch.Tensor) -> torch.Tensor:
        return torch.cat(x_BT.chunk(len(self.runs), 1))

    def together(self, x_BT: torch.Tensor) -> torch.Tensor:
        return torch.cat(x_BT.chunk(len(self.runs)), 1)

    def documents(self, mask: Mask, before: int) -> torch.Tensor | None:
        if not isinstance(mask, Documents):
            return None
        length = mask.documents_BT.shape[1] // self.total
        padded = F.pad(mask.documents_BT, (before, 0), value=-1)
        return torch.cat([padded[:, run * length : (run + 1) * length + before] for run in self.runs])

    def ahead(self, x_BTW: torch.Tensor, count: int) -> torch.Tensor:
        return self._ahead(x_BTW, count)

    def rule(self, heads: Heads, documents: torch.Tensor | None) -> torch.Tensor:
        return self._rule(heads, documents)

    def _before(self, x_BTW: torch.Tensor, count: int) -> torch.Tensor:
        tails_PBtW = self._gather(x_BTW[:, -count:])  # of short runs all tokens
        none = tails_PBtW[0, :, :1].expand(-1, count, -1) * 0  # so every rank takes part in the backward pass
        return torch.cat([torch.cat((none, *tails_PBtW[:run]), 1)[:, -count:] for run in self.runs])

    def _computed(self, heads: Heads, documents: torch.Tensor | None) -> torch.Tensor:
        chunks = cut(heads, documents)
        batch, count, *_, value_width = chunks.values.shape
        width = chunks.keys.shape[-1]
        identity = torch.eye(width, dtype=chunks.keys.dtype, device=chunks.keys.device).expand(batch, count, -1, -1)
        zero = chunks.keys.new_zeros(batch, count, width, value_width)
        maps, _, last = scan(chunks, torch.cat((zero, identity), -1))
        entering_BHKV = self._entering(last, value_width)
        # The state before each chunk, from the one that enters the run.
        states = maps[..., :value_width] + maps[..., value_width:] @ entering_BHKV[:, :, None]
        new = chunks.values - chunks.keys @ states
        return outputs(chunks, states, new, heads.v.shape[1])

    def _entering(self, last_BHKX: torch.Tensor, width: int) -> torch.Tensor:
        """The state that enters each of this rank's runs [B', H, K, V], from U and M of each."""
        maps_PBHKX, entering = self._gather(last_BHKX), []
        state = maps_PBHKX[0, ..., :width] * 0  # see `_before`
        for of_run in maps_PBHKX.unbind():
            entering.append(state)
            state = of_run[..., :width] + of_run[..., width:] @ state
        return torch.cat([entering[run] for run in self.runs])

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B', ...] to [P, B, ...], in the sequence's order."""
        all_NRB = collectives.all_gather(x.contiguous(), self.group).unflatten(
            0, (self.group.size(), len(self.runs), -1)
        )
        if len(self.runs) == 1:
            return all_NRB[:, 0]
        return torch.cat((all_NRB[:, 0], all_NRB[:, 1].flip(0)))

    def __repr__(self) -> str:
        return f"runs {', '.join(map(str, self.runs))} of {self.total}, states passed over cp {self.group.size()}"
