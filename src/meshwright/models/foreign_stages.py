"""Pipeline stages of a model of transformers: its own forward pass, of which a stage computes a few blocks.

Every stage calls the whole forward pass with tokens and positions, so it computes masks and rotary tables as
transformers does. Blocks before the stage are passed over; the stage's first block gets the hidden states that the
previous stage sent, and at the block after its last one the forward pass ends: what that block would get is sent.
Parameters before the blocks (embeddings) read as zeros in later stages, where nothing depends on them.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.models.faces import Face, with_face
from meshwright.models.slots import View, Viewed, Weights
from meshwright.spec.foreign import ForeignCuts


class StageEndError(Exception):
    """Ends a forward pass at the block after a stage's last one; holds what that block would get."""

    def __init__(self, sent: torch.Tensor) -> None:
        super().__init__()
        self.sent = sent


class StageBlocks(nn.ModuleList):
    """The list of blocks, as the running stage's forward pass sees it; its parts are this rank's blocks."""

    cuts: ForeignCuts
    whole: tuple[nn.Module, ...]
    """Every block; of those of other ranks only attributes are used."""
    stage: range | None = None
    """The blocks of the running stage."""
    received: torch.Tensor | None = None
    """What enters the running stage; None: it is the first."""

    @contextmanager
    def running(self, stage: range, received: torch.Tensor | None) -> Iterator[None]:
        """Inside, a forward pass computes this stage."""
        self.stage, self.received = stage, received
        try:
            yield
        finally:
            self.stage = self.received = None

    def __len__(self) -> int:
        return len(self._modules if self.stage is None else self.whole)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._seen())

    def __getitem__(self, index: Any) -> Any:
        return self._seen()[index]

    def _seen(self) -> list[Any]:
        if self.stage is None:
            return list(self._modules.values())
        enters = self.stage.start if self.received is not None else -1
        return [
            self._modules[str(index)] if index in self.stage and index != enters else OutsideBlock(self, index)
            for index in range(len(self.whole))
        ]


class OutsideBlock:
    """Takes the place of a block that is not in the running stage, or gets what the stage received."""

    def __init__(self, blocks: StageBlocks, index: int) -> None:
        self.blocks, self.index = blocks, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocks.whole[self.index], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output; raises `StageEndError` behind the stage."""
        blocks, cuts = self.blocks, self.blocks.cuts
        assert blocks.stage is not None
        holder: Any = kwargs if isinstance(cuts.hidden, str) else args
        if self.index == blocks.stage.stop:
            raise StageEndError(holder[cuts.hidden])
        if self.index < blocks.stage.start:
            hidden = holder[cuts.hidden]
            return (hidden, *[None] * (cuts.outputs - 1)) if cuts.outputs else hidden
        given, named = list(args), dict(kwargs)
        holder = named if isinstance(cuts.hidden, str) else given
        holder[cuts.hidden] = blocks.received
        return blocks._modules[str(self.index)](*given, **named)


class StageView(View):
    """The parameters of a module before the blocks: zeros in every stage but the first."""

    def __init__(self, blocks: StageBlocks, shapes: dict[str, torch.Size]) -> None:
        self.blocks, self.shapes = blocks, shapes
        self.inner = View()
        """Reads them in the first stage."""

    def read(self, module: nn.Module) -> Weights:
        received = self.blocks.received
        if received is None:
            return self.inner.read(module)
        zero = torch.zeros((), dtype=received.dtype, device=received.device)
        return {name: zero.expand(self.shapes[name]) if name in self.shapes else None for name in module._parameters}

    def readable(self, module: nn.Module) -> bool:
        return self.blocks.received is not None or self.inner.readable(module)

    def __repr__(self) -> str:
        return ", ".join(filter(None, (repr(self.inner), "zeros after the first stage")))


def keep_stages(model: nn.Module, path: str, cuts: ForeignCuts, kept: Collection[int]) -> StageBlocks:
    """Drop the parameters that no stage with these blocks needs; returns the list of blocks at `path`, in stages."""
    blocks: Any = with_face(StageBlocks, model.get_submodule(path))
    blocks.cuts, blocks.whole = cuts, tuple(blocks._modules.values())
    blocks._modules = {name: block for name, block in blocks._modules.items() if int(name) in kept}
    replace_module(model, path, blocks)
    first, last = 0 in kept, len(blocks.whole) - 1 in kept
    copied = {model.get_parameter(name) for name in cuts.copied if first or last}
    module: Any
    for name, module in list(model.named_modules()):
        before = cuts.is_before(name)
        if not module._parameters or not (before or cuts.is_after(name)):
            continue
        if before:
            shapes = {key: value.shape for key, value in module._parameters.items() if value is not None}
            if not isinstance(module, Viewed):
                module = with_face(Face, module, module._parameters)
                module._parameters = dict(module._parameters)
                replace_module(model, name, module)
            module.view = StageView(blocks, shapes)
        for key, parameter in module._parameters.items():
            if not (first if before else last) and parameter not in copied:
                module._parameters[key] = None
    return blocks


def run_stage(
    forward: Callable[[], Any], blocks: StageBlocks, stage: range, received: torch.Tensor | None
) -> tuple[bool, Any]:
    """Runs a forward pass; returns whether it ended behind the stage, and what the stage sends, or the result."""
    with blocks.running(stage, received):
        try:
            return False, forward()
        except StageEndError as end:
            return True, end.sent


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in another's place."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent).register_module(name, module)
