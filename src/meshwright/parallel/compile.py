"""The one place for torch.compile: every block by itself, so that one compilation serves all of them."""

import torch
from torch import nn

from meshwright.models.moe import MoE


def apply_compile(blocks: nn.ModuleDict) -> None:
    """Compile each block's forward; what data parallelism hooks around the block stays outside the compiled region.

    Experts are left out: their loads decide the shapes.
    """
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, MoE):
                # Not where the class is defined: a decorator there would load the compiler where nothing is compiled.
                module.__dict__["forward"] = torch.compiler.disable(module.forward)
        block.forward = torch.compile(block.forward, dynamic=False)
