"""A model split over tensor-parallel processes that generate: the first process leads, the others repeat its steps.

Only the first process has requests, samples and writes. Before each forward pass it sends the others the tokens that it
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
    """The first process's next action."""

    begins: bool
    """Whether its rows are new ones."""
    moves: tuple[tuple[int, int] | None, ...]
    """Before it reads: rows moved to other slots, (source, target), and last rows dropped (None)."""
    new: tuple[tuple[int, tuple[int, ...]], ...]
    writing: int
    scored: tuple[int, ...]


class Ranks:
    """The processes that share a model, and this one's role."""

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
        """From now on, every process runs the same requests."""
        reader = functools.partial(CachedReader, multiple=self.mesh.size())
        model.make_reader = reader

    def lead(self, model: Decoder) -> None:
        """From now on, the others repeat this process's reads."""
        pack(model)
        reader = functools.partial(_LeadingReader, ranks=self)
        model.make_reader = reader
        self._leading = True

    def dismiss(self) -> None:
        """End the others, if this process leads them."""
        if self._leading:
            self.send(None)
            self._leading = False

    def send(self, order: _Order | None) -> None:
        """Send the others the next order; None: the end."""
        self.guarded(lambda: from_first(order, self._orders))

    @torch.inference_mode()
    def follow(self, model: Decoder) -> None:
        """Repeat the first process's reads until it ends."""
        pack(model)  # on all or no processes: packed blocks exchange different parts than modules
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
        """The result of `compute`. After an error the processes are at different steps, and none can continue."""
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
        """Read on all processes: the others get the order first."""
        read = tuple((row, tuple(tokens)) for row, tokens in new)
        self._ranks.send(_Order(self._begins, tuple(self._moves), read, writing, tuple(scored)))
        self._begins, self._moves = False, []
        return self._ranks.guarded(lambda: self._inner.read(new, writing, scored))

    def read_hidden(self, new: New, writing: int, scored: Sequence[int] = ()) -> NoReturn:
        """Not possible: each process has the hidden states of some tokens only."""
        raise NotImplementedError

    def move(self, source: int, target: int) -> None:
        """Move a row, also in the next order."""
        self._moves.append((source, target))
        self._inner.move(source, target)

    def drop_last(self) -> None:
        """Drop the last row, also in the next order."""
        self._moves.append(None)
        self._inner.drop_last()
