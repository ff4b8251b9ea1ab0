"""Weights mapped from files: while one block computes, the next blocks are read and the previous ones dropped."""

import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from meshwright.models.slots import Compute, Wrapped
from meshwright.state.files import Home
from meshwright.torch_internals import local_tensor

Places = dict[int, tuple[torch.Tensor, Home, int]]
"""Identity of a local tensor -> the tensor, its home, and its offset there."""
AHEAD = 2
"""Blocks that are read ahead: FSDP2 gathers one in advance of the backward pass."""


class BlocksAhead:
    """The blocks of a model, in the order in which passes enter them. The parameters outside them count as another
    block after the last."""

    def __init__(self, model: nn.Module, places: Places) -> None:
        blocks = [block for block in model.get_submodule("layers").children() if isinstance(block, Wrapped)]
        inside = {id(local_tensor(parameter)) for block in blocks for parameter in block.parameters()}
        rest = (parameter for parameter in model.parameters() if id(local_tensor(parameter)) not in inside)
        self._parts = [_parts(block.parameters(), places) for block in blocks] + [_parts(rest, places)]
        self._held: dict[int, Future[None]] = {}
        """Blocks that are in memory or being read."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-ahead")
        for index, block in enumerate(blocks):
            block.wrap(_Entered(weakref.ref(self), index))

    def enter(self, index: int, way: int) -> None:
        """A pass enters a block: forward with `way` 1, backward with -1. Raises `OffloadError` if a file fails."""
        outside = len(self._parts) - 1
        order = (index + step * way for step in range(AHEAD + 1))
        wanted = [outside if place == -1 else place for place in order if -1 <= place <= outside]
        self._drop(self._held.keys() - set(wanted))
        for place in wanted:
            if place not in self._held:
                self._held[place] = self._thread.submit(self._read, place)
        self._held[index].result()

    def forget(self) -> None:
        """Drop all blocks, before their files change."""
        self._drop(set(self._held))

    def _drop(self, places: Iterable[int]) -> None:
        for place in places:
            del self._held[place]
            self._thread.submit(self._leave, place)

    def _read(self, place: int) -> None:
        for home, offset, size in self._parts[place]:
            home.expect(offset, size)

    def _leave(self, place: int) -> None:
        for home, offset, size in self._parts[place]:
            home.drop(offset, size)


def _parts(parameters: Iterable[torch.Tensor], places: Places) -> list[tuple[Home, int, int]]:
    """Home, offset and bytes of the parameters that have homes."""
    found = (places.get(id(local_tensor(parameter))) for parameter in parameters)
    return [(home, offset, tensor.nbytes) for tensor, home, offset in filter(None, found)]


class _Entered:
    """A wrapper of a block that reports when passes enter it."""

    def __init__(self, blocks: "weakref.ref[BlocksAhead]", index: int) -> None:
        self._blocks, self._index = blocks, index

    def __call__(self, compute: Compute) -> Compute:
        """The block's forward pass; its backward pass begins with the gradient of its result."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(1)
            result = compute(*args, **kwargs)
            if result.requires_grad:
                result.register_hook(lambda gradient: self._enter(-1))
            return result

        return run

    def _enter(self, way: int) -> None:
        blocks = self._blocks()
        assert blocks is not None, "the store lives as long as its model trains"
        blocks.enter(self._index, way)

    def __repr__(self) -> str:
        return "weights on disk"
