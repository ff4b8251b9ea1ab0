"""Blocks whose weights stay on disk: each is read while the block before it computes.

Memory holds embeddings, final norm and head, and the weights of two blocks: the one that computes, and the next one,
which a thread reads meanwhile. Every forward pass reads every block once, for any number of rows.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from meshwright.models.decoder import Block, Decoder
from meshwright.models.slots import Compute

Fill = Callable[[Mapping[str, torch.Tensor]], None]
"""Reads the numbers of parameters into these tensors, by name."""
ALIGNED = 64
"""Parameters begin at multiples of this many bytes."""


class BlocksFromDisk:
    """The weights of a model's blocks, with two blocks in memory at a time."""

    def __init__(self, model: Decoder, fill: Fill) -> None:
        """`model` is on the meta device. Its blocks get a wrapper and everything else gets memory on the CPU;
        parameters outside blocks are left uninitialised."""
        self._fill = fill
        self._count = len(model.layers)
        self._parameters: list[dict[str, nn.Parameter]] = []
        self._shapes: list[dict[str, tuple[torch.Size, torch.dtype, int]]] = []
        sizes = []
        for name, child in model.named_children():
            if name != "layers":
                child.to_empty(device="cpu")
        for index, (key, block) in enumerate(model.layers.items()):
            shaped = {name: (parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()}
            block._apply(_allocated)
            parameters = {f"layers.{key}.{name}": parameter for name, parameter in block.named_parameters()}
            shapes, end = {}, 0
            for name, (shape, dtype) in zip(parameters, shaped.values(), strict=True):
                shapes[name] = shape, dtype, end
                end += -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED
            self._parameters.append(parameters)
            self._shapes.append(shapes)
            sizes.append(end)
            assert isinstance(block, Block)
            block.wrap(_FromDisk(self, index))
        self.bytes_per_pass = sum(sizes)
        """Bytes of all blocks' weights in the model's dtype."""
        self._rooms = [torch.empty(max(sizes), dtype=torch.uint8) for _ in range(min(2, len(sizes)))]
        self._held: list[int | None] = [None] * len(self._rooms)
        """Number of the block in each room."""
        self._here: int | None = None
        """Number of the block whose parameters are filled."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-read")
        self._coming: tuple[int, int, Future[None]] | None = None
        """The block being read, its room, and the future of the read."""

    def enter(self, index: int) -> None:
        """Give block `index` its weights, and read the next one's."""
        if self._here == index:
            return
        if self._coming is not None:
            (block, room, reading), self._coming = self._coming, None
            reading.result()
            self._held[room] = block
        if index not in self._held:
            room = 0 if self._here is None or self._held[0] != self._here else len(self._rooms) - 1
            self._held[room] = None
            self._read(index, room)
            self._held[room] = index
        if self._here is not None:
            for parameter in self._parameters[self._here].values():
                parameter.data = parameter.data.new_empty(0)
        room = self._held.index(index)
        for name, tensor in self._views(index, room).items():
            self._parameters[index][name].data = tensor
        self._here = index
        following = (index + 1) % self._count
        if following not in self._held:
            other = 1 - room
            self._held[other] = None
            self._coming = following, other, self._thread.submit(self._read, following, other)

    def _read(self, index: int, room: int) -> None:
        with torch.no_grad():
            self._fill(self._views(index, room))

    def _views(self, index: int, room: int) -> dict[str, torch.Tensor]:
        memory = self._rooms[room]
        return {
            name: memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype, begin) in self._shapes[index].items()
        }


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a block's buffers, and none for its parameters."""
    if isinstance(tensor, nn.Parameter):
        return torch.empty(0, dtype=tensor.dtype)
    return torch.empty_like(tensor, device="cpu")


class _FromDisk:
    """A wrapper of a block; it computes the block after its weights have been read."""

    def __init__(self, blocks: BlocksFromDisk, index: int) -> None:
        self.blocks, self.index = blocks, index

    def __call__(self, compute: Compute) -> Compute:
        """The block's forward pass."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.blocks.enter(self.index)
            return compute(*args, **kwargs)

        return run

    def __repr__(self) -> str:
        return "from disk"


def blocks_from_disk(model: Decoder) -> BlocksFromDisk | None:
    """The model's blocks on disk, or None if they are in memory."""
    wrappers = (wrapper for block in model.layers.values() for wrapper in getattr(block, "wrappers", ()))
    return next((wrapper.blocks for wrapper in wrappers if isinstance(wrapper, _FromDisk)), None)
