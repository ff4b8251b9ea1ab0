"""torch.compile: every block by itself, so that one compilation serves all of them."""

import torch
from torch import nn

from meshwright.models.moe import MoE
from meshwright.models.slots import Compute, Wrapped


class Compiled:
    """A compiled forward pass; data parallelism's hooks around the module stay outside."""

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, compiled when it is first called."""
        return torch.compile(compute, dynamic=False)

    def __repr__(self) -> str:
        return "compiled"


class NotCompiled:
    """A forward pass that interrupts the compiled one around it."""

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, excluded from compilation. (A decorator at class definition would load the compiler even where
        nothing is compiled.)"""
        return torch.compiler.disable(compute)

    def __repr__(self) -> str:
        return "not compiled"


def apply_compile(blocks: nn.ModuleDict) -> None:
    """Compile each block. Experts are left out, because their loads determine shapes."""
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, MoE):
                module.wrap(NotCompiled())
        assert isinstance(block, Wrapped)
        block.wrap(Compiled())
