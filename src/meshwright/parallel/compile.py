"""torch.compile of single blocks, so that one compilation serves all of them."""

from typing import Any

import torch
from torch import nn

from meshwright.models.moe import MoE
from meshwright.models.slots import Compute, Wrapped
from meshwright.spec.training import CompileMode


class Compiled:
    """A compiled forward pass; data parallelism's hooks around the module stay outside."""

    def __init__(self, mode: CompileMode = "default") -> None:
        self.mode: CompileMode = mode

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, compiled when it is first called."""
        options: dict[str, Any] = {} if self.mode == "default" else {"mode": self.mode}
        return torch.compile(compute, dynamic=False, **options)

    def __repr__(self) -> str:
        return describe_compile(self.mode)


class NotCompiled:
    """A forward pass that interrupts the compiled one around it."""

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, excluded from compilation. (A decorator at class definition would load the compiler even where
        nothing is compiled.)"""
        return torch.compiler.disable(compute)

    def __repr__(self) -> str:
        return "not compiled"


def describe_compile(mode: CompileMode) -> str:
    """How blocks are compiled."""
    return "compiled" if mode == "default" else f"compiled ({mode})"


def apply_compile(blocks: nn.ModuleDict, mode: CompileMode = "default") -> None:
    """Compile each block. Experts are left out, because their loads determine shapes."""
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, MoE):
                module.wrap(NotCompiled())
        assert isinstance(block, Wrapped)
        block.wrap(Compiled(mode))
