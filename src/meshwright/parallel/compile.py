"""torch.compile of single blocks, which share one compilation, or of everything before the head."""

from typing import Any

import torch

from meshwright.models import Decoder
from meshwright.models.moe import MoE
from meshwright.models.slots import Compute, Wrapped
from meshwright.spec.training import CompileMode, CompileScope


class Compiled:
    """A compiled forward pass; data parallelism's hooks around the module stay outside."""

    def __init__(self, mode: CompileMode = "default", scope: CompileScope = "block") -> None:
        self.mode: CompileMode = mode
        self.scope: CompileScope = scope

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, compiled when it is first called."""
        options: dict[str, Any] = {} if self.mode == "default" else {"mode": self.mode}
        return torch.compile(compute, dynamic=False, **options)

    def __repr__(self) -> str:
        return describe_compile(self.mode, self.scope)


class NotCompiled:
    """A forward pass that interrupts the compiled one around it."""

    def __call__(self, compute: Compute) -> Compute:
        """`compute`, excluded from compilation. (A decorator at class definition would load the compiler even where
        nothing is compiled.)"""
        return torch.compiler.disable(compute)

    def __repr__(self) -> str:
        return "not compiled"


def describe_compile(mode: CompileMode, scope: CompileScope = "block") -> str:
    """The compiled parts and the mode, in words."""
    words = [*(["as one"] if scope == "model" else []), *([mode] if mode != "default" else [])]
    return f"compiled ({', '.join(words)})" if words else "compiled"


def apply_compile(model: Decoder, mode: CompileMode = "default", scope: CompileScope = "block") -> None:
    """Compile each block, or the model up to its head as one program, interrupted where data parallelism gathers
    weights. Experts are left out, because their loads determine shapes."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.wrap(NotCompiled())
    if scope == "model":
        model.wrap(Compiled(mode, scope))
        return
    for block in model.layers.values():
        assert isinstance(block, Wrapped)
        block.wrap(Compiled(mode))
