"""The one place for activation recomputation: which of a block's activations are kept and which computed again."""

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.models.attention import VARLEN_OPS
from meshwright.models.cpu_kernels import MATMULS

aten = torch.ops.aten

# What selective recomputation keeps: the results that are dear to compute for their size (Korthikanti et al., "Reducing
# Activation Recomputation in Large Transformer Models", 2022, keeps all but attention; with flash attention that
# turns round: attention and matrix products are kept, the cheap element-wise chain between them is not).
KEPT = frozenset(
    op
    for op in (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        *MATMULS,
        *VARLEN_OPS,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math.default,
    )
)


def _keep_dear_results(ctx: object, op: Callable, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: nn.ModuleDict, mode: Literal["none", "selective", "full"]) -> None:
    """Make every block recompute its activations in the backward pass; parameter names stay as they are."""
    if mode == "none":
        return
    options: dict[str, object] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_dear_results)
    for block in blocks.values():
        block.forward = functools.partial(checkpoint, block.forward, **options)
