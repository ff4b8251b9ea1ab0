"""Base class of users' own models: Meshwright's decoder with custom blocks.

    class SquaredReLU(FeedForward):
        def forward(self, x_BTD):
            x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
            return self.w2(F.relu(self.w1(x_BTD)) ** 2)

    class MyBlock(Block):
        def __init__(self, spec, layer):
            super().__init__(spec, layer)
            self.feed_forward = SquaredReLU(spec, spec.ffn)

    class MyModel(Model):
        base, switches = "llama", {"gated": False}  # two matrices

        def block(self, spec, layer):
            return MyBlock(spec, layer)

Parameters with the name of one in the base keep its dims; `dims` declares the dims of all others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from meshwright.families import parameter_table
from meshwright.models.decoder import Block, Decoder
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, Parameter


class Model(ABC):
    """A user's model; the recipe sets its sizes as for any family (`model: {family: NAME, hidden: ...}`)."""

    base: ClassVar[str] = "llama"
    """The family that provides defaults, switches, embeddings, norms and head."""
    switches: ClassVar[Mapping[str, Any]] = {}
    """Fields of `ModelSpec` that differ from the base's."""
    dims: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Name of a parameter within its block (`mixer.gate.weight`) -> its named dims, a weight's (out, in)."""
    zeros: ClassVar[tuple[str, ...]] = ()
    """The names among `dims` that are initialized to zero. Other matrices are random, biases start at zero, other
    vectors at one."""

    @abstractmethod
    def block(self, spec: ModelSpec, layer: int) -> Block:
        """The block of a layer, with uninitialised parameters."""

    def build(self, spec: ModelSpec) -> Decoder:
        """The whole model on the meta device."""
        with torch.device("meta"):
            model = Decoder(spec, self.block)
        for key, block in model.layers.items():
            if not isinstance(block, Block):
                raise UserError(
                    f"model.family {spec.family}: layer {key} is {type(block).__name__}, not a meshwright.Block"
                )
        return model

    def table(self, spec: ModelSpec) -> Iterator[Parameter]:
        """Every parameter, in the order of `named_parameters()`."""
        like = spec.model_copy(update={"family": self.base})
        known = {row.name: row for row in parameter_table(like)}
        for name, parameter in self.build(like).named_parameters():
            shape, row = tuple(parameter.shape), known.get(name)
            yield row if row is not None and row.shape == shape else self._row(name, shape, spec)

    def _row(self, name: str, shape: tuple[int, ...], spec: ModelSpec) -> Parameter:
        inner = name.split(".", 2)[-1]
        if inner not in self.dims:
            raise UserError(
                f"model.family {spec.family}: {name} has shape {list(shape)} and no dims; name them, as in "
                f"dims = {{{inner!r}: ('ffn', 'embed')}}"
            )
        drawn = len(shape) > 1 and inner not in self.zeros
        init = "normal" if drawn else "zeros" if inner in self.zeros or inner.endswith("bias") else "ones"
        std = spec.init_std if drawn else 0.0
        return Parameter(name=name, dims=tuple(self.dims[inner]), shape=shape, init=init, init_std=std)
