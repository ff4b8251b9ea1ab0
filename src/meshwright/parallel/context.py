"""Context parallelism: each rank holds a part of every sequence and attends to all of it.

Everything but attention works on single tokens, so the batch is split once, and only attention communicates:

- ring (Liu et al., 2023): keys and values travel around the ring, and each rank attends to the part it has received;
- all_gather (as for Llama 3, Dubey et al., 2024, section 3.3.2): every rank gets all keys and values at once;
- ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023): an all-to-all trades a part of the tokens of all heads for all
  tokens of a part of the heads, attention is computed as on one device, and another all-to-all reverses the exchange.

For ring and all_gather a sequence is cut into 2 N chunks, and rank r holds chunks r and 2N-1-r, so that all ranks have
the same work under a causal mask ("zigzag"). For ulysses it is cut into N.

Shapes: B batch, T tokens of a rank, H heads, G key and value heads, K head_dim, N ranks, C tokens of a chunk, S keys of
a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm import collectives
from meshwright.models import Decoder
from meshwright.models.attention import Attention, Core, SinkCore
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.foreign_context import ContextShare
from meshwright.models.gated_delta import GatedDelta
from meshwright.models.masks import Documents, Mask, attention_mask
from meshwright.models.partial_attention import (
    PartMask,
    Queries,
    add_part_,
    attend_part,
    attend_part_backward,
    own_chunks,
)
from meshwright.models.sinks import add_sinks_, sinks_gradient
from meshwright.parallel.context_states import RunsOfRanks
from meshwright.spec.layout import ContextMethod


def apply_context_parallel(model: Decoder, mesh: DeviceMesh, method: ContextMethod) -> None:
    """Make the attention of every block see whole sequences, while each rank of `mesh` holds `sequence_places`."""
    group = mesh.get_group()
    model.head_split.sequence = _SequenceShare(group, mesh.get_local_rank())
    if isinstance(model, ForeignDecoder):
        model.share_context(ContextShare(group.rank(), group.size(), lambda x: collectives.all_gather(x, group, dim=2)))
        return
    for module in model.modules():
        if isinstance(module, GatedDelta):
            rank, degree = group.rank(), group.size()
            module.pieces = RunsOfRanks(group, (rank,) if method == "ulysses" else own_chunks(rank, degree))
        if isinstance(module, Attention):
            match method:
                case "ulysses":
                    module.core = Ulysses(group, module.core, module.window)
                case "ring" | "all_gather":
                    module.core = ByParts(group, method, module.window)
                case _:
                    assert_never(method)


def sequence_places(method: ContextMethod, *, degree: int, rank: int, length: int) -> np.ndarray:
    """A rank's positions in a row of `length` tokens, in the order in which it holds them: int64 [T]."""
    match method:
        case "ulysses":
            return np.arange(length).reshape(degree, -1)[rank]
        case "ring" | "all_gather":
            return np.arange(length).reshape(2 * degree, -1)[list(own_chunks(rank, degree))].ravel()
        case _:
            assert_never(method)


class _SequenceShare:
    """This rank's tokens of every row, for `HeadSplit`."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group, self.rank, self.counts = group, rank, rank == 0

    def __str__(self) -> str:
        return f"part {self.rank} of {self.group.size()}"

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(parts, self.group)


class _NotCompiled(Core):
    """A core excluded from compilation: neither communication nor code that depends on this rank's index can be
    compiled."""

    def __init__(self) -> None:
        self._attend: Any = torch.compiler.disable(self.attend)

    def __call__(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, mask: Mask) -> torch.Tensor:
        return self._attend(q_BHTK, k_BGTK, v_BGTK, mask)

    def with_sinks(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask, sinks_H: torch.Tensor
    ) -> torch.Tensor:
        return self._attend(q_BHTK, k_BGSK, v_BGSK, mask, sinks_H)

    def attend(
        self,
        q_BHTK: torch.Tensor,
        k_BGTK: torch.Tensor,
        v_BGTK: torch.Tensor,
        mask: Mask,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Core`; documents cover whole rows. Collective."""
        raise NotImplementedError


class Ulysses(_NotCompiled):
    """Attention to all tokens with a part of the heads, computed as on one device."""

    def __init__(self, group: dist.ProcessGroup, core: Core, window: int | None) -> None:
        super().__init__()
        self.group, self.core, self.window = group, core, window
        self.degree = group.size()

    def attend(
        self,
        q_BHTK: torch.Tensor,
        k_BGTK: torch.Tensor,
        v_BGTK: torch.Tensor,
        mask: Mask,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Core`. Collective."""
        if not isinstance(mask, Documents):  # then it was made for this rank's tokens alone
            length = q_BHTK.shape[2] * self.degree
            mask = attention_mask(length, length, window=self.window, device=q_BHTK.device)
        heads, kv_heads = q_BHTK.shape[1], k_BGTK.shape[1]
        # With fewer key and value heads than ranks, heads are copied as often as needed.
        shares = range(1, heads // kv_heads + 1)
        repeats = next(n for n in shares if heads // kv_heads % n == 0 and kv_heads * n % self.degree == 0)
        if repeats > 1:
            k_BGTK, v_BGTK = k_BGTK.repeat_interleave(repeats, 1), v_BGTK.repeat_interleave(repeats, 1)
        q_BhSK, k_BgSK, v_BgSK = (self._to_heads(x) for x in (q_BHTK, k_BGTK, v_BGTK))
        core = self.core if sinks_H is None else SinkCore(self.core, sinks_H.chunk(self.degree)[self.group.rank()])
        return self._to_tokens(core(q_BhSK, k_BgSK, v_BgSK, mask))

    def __repr__(self) -> str:
        return f"ulysses over cp {self.degree} of {self.core}"

    def _to_heads(self, x_BHTK: torch.Tensor) -> torch.Tensor:
        """A rank's tokens of all heads to all tokens of its share of the heads."""
        x_NBhTK = collectives.all_to_all(x_BHTK.unflatten(1, (self.degree, -1)).movedim(1, 0), self.group)
        return x_NBhTK.movedim(0, 2).flatten(2, 3)

    def _to_tokens(self, x_BhSK: torch.Tensor) -> torch.Tensor:
        x_NBhTK = collectives.all_to_all(x_BhSK.unflatten(2, (self.degree, -1)).movedim(2, 0), self.group)
        return x_NBhTK.movedim(0, 1).flatten(1, 2)


class ByParts(_NotCompiled):
    """Attention of this rank's queries to all keys before them, part by part."""

    def __init__(self, group: dist.ProcessGroup, method: ContextMethod, window: int | None) -> None:
        super().__init__()
        self.group, self.method, self.window = group, method, window

    def attend(
        self,
        q_BHTK: torch.Tensor,
        k_BGTK: torch.Tensor,
        v_BGTK: torch.Tensor,
        mask: Mask,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Core`. Collective."""
        zigzag = _Zigzag(
            rank=self.group.rank(),
            degree=self.group.size(),
            chunk=q_BHTK.shape[2] // 2,
            window=self.window,
            documents=mask.documents_BT if isinstance(mask, Documents) else None,
            device=q_BHTK.device,
        )
        function = _Ring if self.method == "ring" else _AllGather
        return function.apply(q_BHTK, k_BGTK, v_BGTK, zigzag, self.group, sinks_H)

    def __repr__(self) -> str:
        return f"{self.method} over cp {self.group.size()}"


class _Part(NamedTuple):
    """Some of a rank's queries, some of the available keys, and the mask between them."""

    queries: slice
    keys: slice
    mask: PartMask


@dataclass(frozen=True)
class _Zigzag:
    """The keys of other chunks that this rank's two chunks of queries see."""

    rank: int
    degree: int
    chunk: int
    """Tokens of a chunk."""
    window: int | None
    documents: torch.Tensor | None
    """Document ids of whole rows, [B, S]."""
    device: torch.device

    def own(self) -> list[_Part]:
        """Parts of the keys that this rank holds."""
        chunks = own_chunks(self.rank, self.degree)
        return self._part(slice(None), chunks, slice(None), chunks)

    def of_rank(self, source: int) -> list[_Part]:
        """Parts of the keys that another rank holds."""
        ours, theirs = own_chunks(self.rank, self.degree), own_chunks(source, self.degree)
        if source < self.rank:  # their second chunk comes after both of ours
            return self._part(slice(None), ours, slice(0, self.chunk), theirs[:1])
        return self._part(slice(self.chunk, None), ours[1:], slice(None), theirs)

    def of_all(self) -> list[_Part]:
        """Parts of all keys in sequence order, except this rank's own."""
        early, late = ours = own_chunks(self.rank, self.degree)
        before, between = slice(0, early * self.chunk), slice((early + 1) * self.chunk, late * self.chunk)
        return [
            *self._part(slice(None), ours, before, range(early)),
            *self._part(slice(self.chunk, None), ours[1:], between, range(early + 1, late)),
        ]

    def _part(self, queries: slice, ours: Sequence[int], keys: slice, theirs: Sequence[int]) -> list[_Part]:
        """One part, or none if the queries see no key. `ours` and `theirs` are the chunks of queries and keys."""
        if not theirs:
            return []
        nearest = ours[0] * self.chunk - (theirs[-1] + 1) * self.chunk + 1
        farthest = (ours[-1] + 1) * self.chunk - 1 - theirs[0] * self.chunk
        if self.window is not None and nearest >= self.window:
            return []
        if self.documents is None and (self.window is None or farthest < self.window):
            return [_Part(queries, keys, "causal" if ours is theirs else "all")]
        queries_Q1, keys_S = self._places(ours)[:, None], self._places(theirs)
        sees = keys_S <= queries_Q1
        if self.window is not None:
            sees &= keys_S > queries_Q1 - self.window
        if self.documents is not None:
            sees = (sees & (self.documents[:, queries_Q1] == self.documents[:, None, keys_S]))[:, None]
        return [_Part(queries, keys, sees)]

    def _places(self, chunks: Sequence[int]) -> torch.Tensor:
        one_C = torch.arange(self.chunk, device=self.device)
        return torch.cat([one_C + chunk * self.chunk for chunk in chunks])


class _Sum:
    """A running sum of attention: begins with this rank's own keys; other parts are added."""

    def __init__(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, zigzag: _Zigzag) -> None:
        self.q_BHTK = q_BHTK
        (own,) = zigzag.own()
        self.y_BHTK, self.logsumexp_BHT = attend_part(q_BHTK, k_BGTK, v_BGTK, own.mask)

    def add(self, parts: list[_Part], k_BGSK: torch.Tensor, v_BGSK: torch.Tensor) -> None:
        for queries, keys, mask in parts:
            part = attend_part(self.q_BHTK[:, :, queries], k_BGSK[:, :, keys], v_BGSK[:, :, keys], mask)
            add_part_(self.y_BHTK[:, :, queries], self.logsumexp_BHT[:, :, queries], *part)

    def finished(self, sinks_H: torch.Tensor | None) -> torch.Tensor:
        """The result in the queries' dtype, the sinks added."""
        if sinks_H is not None:
            add_sinks_(self.y_BHTK, self.logsumexp_BHT, sinks_H)
        return self.y_BHTK.to(self.q_BHTK.dtype)


class _Backward:
    """The gradients of this rank's queries and, from the same products, of the available keys and values."""

    def __init__(self, all_queries: Queries) -> None:
        self.all_queries = all_queries
        self.grad_q_BHTK = torch.zeros_like(all_queries.q, dtype=all_queries.logsumexp.dtype)

    def of_sinks(self, sinks_H: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the sinks, if there are any."""
        return None if sinks_H is None else sinks_gradient(self.all_queries, sinks_H)

    def finished(self, grad_k: torch.Tensor, grad_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of queries, keys and values."""
        return self.grad_q_BHTK.to(self.all_queries.q.dtype), grad_k, grad_v

    def of_keys(self, parts: list[_Part], k_BGSK: torch.Tensor, v_BGSK: torch.Tensor) -> torch.Tensor:
        """Gradients of the keys and values, joined as by `_join`; the queries' gradient is accumulated."""
        width = k_BGSK.shape[-1] + v_BGSK.shape[-1]
        grads_BGSW = torch.zeros(*k_BGSK.shape[:-1], width, dtype=self.grad_q_BHTK.dtype, device=k_BGSK.device)
        for queries, keys, mask in parts:
            some_queries = Queries(*(x[:, :, queries].contiguous() for x in self.all_queries))
            grad_q, *grads = attend_part_backward(some_queries, k_BGSK[:, :, keys], v_BGSK[:, :, keys], mask)
            self.grad_q_BHTK[:, :, queries] += grad_q
            grads_BGSW[:, :, keys] += torch.cat(grads, -1)
        return grads_BGSW


def _join(k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> torch.Tensor:
    """Keys and values concatenated, so that they travel in one message; their widths may differ."""
    return torch.cat((k_BGTK, v_BGTK), -1)


def _separate(joint_BGTW: torch.Tensor, like_BGTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, of the width of `like`, and values split again, or their gradients in its dtype."""
    width = like_BGTK.shape[-1]
    return joint_BGTW[..., :width].to(like_BGTK.dtype), joint_BGTW[..., width:].to(like_BGTK.dtype)


class _Ring(torch.autograd.Function):
    """Ring attention: keys and values are sent to the next rank while the current ones are attended to. In the backward
    pass their gradients travel with them and return to their rank after N hops."""

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK, zigzag, group, sinks_H):
        coming = collectives.hop(_join(k_BGTK, v_BGTK), group)
        total = _Sum(q_BHTK, k_BGTK, v_BGTK, zigzag)
        for step in range(1, zigzag.degree):
            held = coming.wait()
            if step < zigzag.degree - 1:
                coming = collectives.hop(held, group)
            total.add(zigzag.of_rank((zigzag.rank - step) % zigzag.degree), *_separate(held, k_BGTK))
        y_BHTK = total.finished(sinks_H)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, y_BHTK, total.logsumexp_BHT, sinks_H)
        ctx.zigzag, ctx.group = zigzag, group
        return y_BHTK

    @staticmethod
    def backward(ctx, *grad_outputs):
        q_BHTK, k_BGTK, v_BGTK, y_BHTK, logsumexp_BHT, sinks_H = ctx.saved_tensors
        zigzag, group = ctx.zigzag, ctx.group
        backward = _Backward(Queries(grad_outputs[0], q_BHTK, y_BHTK, logsumexp_BHT))
        held, grads = _join(k_BGTK, v_BGTK), None
        for step in range(zigzag.degree):
            coming = collectives.hop(held, group) if step < zigzag.degree - 1 else None
            parts = zigzag.of_rank((zigzag.rank - step) % zigzag.degree) if step else zigzag.own()
            ours = backward.of_keys(parts, *_separate(held, k_BGTK))
            grads = collectives.hop(ours if grads is None else ours.add_(grads.wait()), group)
            held = held if coming is None else coming.wait()
        assert grads is not None
        return *backward.finished(*_separate(grads.wait(), k_BGTK)), None, None, backward.of_sinks(sinks_H)


class _AllGather(torch.autograd.Function):
    """All-gather attention: all keys and values at once; the backward pass gathers them again and reduces their
    gradients."""

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK, zigzag, group, sinks_H):
        total = _Sum(q_BHTK, k_BGTK, v_BGTK, zigzag)
        total.add(zigzag.of_all(), *_gather(k_BGTK, v_BGTK, group))
        y_BHTK = total.finished(sinks_H)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, y_BHTK, total.logsumexp_BHT, sinks_H)
        ctx.zigzag, ctx.group = zigzag, group
        return y_BHTK

    @staticmethod
    def backward(ctx, *grad_outputs):
        q_BHTK, k_BGTK, v_BGTK, y_BHTK, logsumexp_BHT, sinks_H = ctx.saved_tensors
        backward = _Backward(Queries(grad_outputs[0], q_BHTK, y_BHTK, logsumexp_BHT))
        of_all = backward.of_keys(ctx.zigzag.of_all(), *_gather(k_BGTK, v_BGTK, ctx.group))
        own = backward.of_keys(ctx.zigzag.own(), k_BGTK, v_BGTK)
        grads = own.add_(_reduce_scatter(of_all, ctx.group))
        return *backward.finished(*_separate(grads, k_BGTK)), None, None, backward.of_sinks(sinks_H)


def _gather(k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all ranks in sequence order."""
    all_NBGTW = collectives.all_gather(_join(k_BGTK, v_BGTK), group).unflatten(0, (group.size(), -1))
    early_NBGCW, late_NBGCW = all_NBGTW.chunk(2, dim=3)
    return _separate(torch.cat((*early_NBGCW, *late_NBGCW.flip(0)), dim=2), k_BGTK)


def _reduce_scatter(grads_BGSW: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The reverse of `_gather`: the sum over ranks of the gradients of this rank's keys and values, [B, G, T, W]."""
    chunks = grads_BGSW.chunk(2 * group.size(), dim=2)
    by_rank = [torch.cat((chunks[i], chunks[-1 - i]), dim=2) for i in range(group.size())]
    return collectives.reduce_scatter(torch.cat(by_rank), group)
