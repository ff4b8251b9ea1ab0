"""A model split over tensor-parallel processes that generate: the first process leads, the others repeat its steps.

Only the first process has requests, samples and writes. Before each forward pass it tells the others which tokens it
reads, and they read the same ones: each has its heads' part of the KV cache. In evaluations every process runs the same
program instead, and gets the same logits.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.objects import from_first
from meshwright.models import Decoder
from meshwright.models.packed import pack
from meshwright.serve.readers import CachedReader, New

PATIENCE = timedelta(days=3650)
"""How long a process waits for the next step: a server may be idle."""


@dataclass(frozen=True)
class _Order:
    """What the first process does next."""

    begins: bool
    """Whether its rows are new ones."""
    moves: tuple[tuple[int, int] | None, ...]
    """Rows put into others' places, (source, target), and last rows forgotten (None), before it reads."""
    new: tuple[tuple[int, tuple[int, ...]], ...]
    writing: int
    scored: tuple[int, ...]


class Ranks:
    """The processes that share a model; this one's place among them."""

    def __init__(self, mesh: DeviceMesh, lost: Callable[[BaseException], NoReturn]) -> None:
        """`mesh` is the axis `tp`. `lost` ends this process when it has lost the others. Collective."""
        self.mesh, self._lost = mesh, lost
        orders = dist.new_group(timeout=PATIENCE)
        assert isinstance(orders, dist.ProcessGroup)
        self._orders = orders
        self._leading = False

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.mesh.get_local_rank() == 0

    def alike(self, model: Decoder) -> None:
        """Every process runs the same requests from here on."""
        reader = functools.partial(CachedReader, multiple=self.mesh.size())
        model.make_reader = reader

    def lead(self, model: Decoder) -> None:
        """The others repeat what this process reads from here on."""
        pack(model)
        reader = functools.partial(_LeadingReader, ranks=self)
        model.make_reader = reader
        self._leading = True

    def dismiss(self) -> None:
        """Let the others end, where this process leads them."""
        if self._leading:
            self.tell(None)
            self._leading = False

    def tell(self, order: _Order | None) -> None:
        """Tell the others what is read next; None: nothing any more."""
        self.guarded(lambda: from_first(order, self._orders))

    @torch.inference_mode()
    def follow(self, model: Decoder) -> None:
        """Repeat what the first process reads, until it ends."""
        pack(model)  # all or none: packed blocks exchange other parts than modules do
        reader = CachedReader(model, self.mesh.size())
        while True:
            order = self.guarded(lambda: from_first(None, self._orders))
            if order is None:
                return
            if order.begins:
                reader = CachedReader(model, self.mesh.size())
            for move in order.moves:
                if move is None:
                    reader.drop_last()
                else:
                    reader.move(*move)
            self.guarded(lambda reader=reader, order=order: reader.read(order.new, order.writing, order.scored))

    def guarded(self, compute: Callable):
        """What `compute` returns. After an error processes are no longer at the same step, and none can go on."""
        try:
            return compute()
        except Exception as error:
            self._lost(error)


class _LeadingReader:
    """The first process's rows."""

    def __init__(self, model: Decoder, ranks: Ranks) -> None:
        self._inner, self._ranks = CachedReader(model, ranks.mesh.size()), ranks
        self._begins = True
        self._moves: list[tuple[int, int] | None] = []

    def read(self, new: New, writing: int, scored: Sequence[int] = ()) -> torch.Tensor:
        """See `Reader`."""
        read = tuple((row, tuple(tokens)) for row, tokens in new)
        self._ranks.tell(_Order(self._begins, tuple(self._moves), read, writing, tuple(scored)))
        self._begins, self._moves = False, []
        return self._ranks.guarded(lambda: self._inner.read(new, writing, scored))

    def move(self, source: int, target: int) -> None:
        """See `Reader`."""
        self._moves.append((source, target))
        self._inner.move(source, target)

    def drop_last(self) -> None:
        """See `Reader`."""
        self._moves.append(None)
        self._inner.drop_last()
