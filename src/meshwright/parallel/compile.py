"""The one place for torch.compile: every block by itself, so that one compilation serves all of them."""

import torch
from torch import nn


def apply_compile(blocks: nn.ModuleDict) -> None:
    """Compile each block's forward; what data parallelism hooks around the block stays outside the compiled region."""
    for block in blocks.values():
        block.forward = torch.compile(block.forward, dynamic=False)
