"""The one place for activation recomputation: which of a block's activations are kept and which computed again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import checkpoint as selective
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.models.adapters import LoraLinear
from meshwright.models.attention import VARLEN_OPS
from meshwright.models.cpu_kernels import MATMULS
from meshwright.spec.recompute import Policy

aten = torch.ops.aten

PRODUCTS: dict[Any, int] = {**dict.fromkeys((aten.mm.default, aten.bmm.default, *MATMULS), 0), aten.addmm.default: 1}
"""Matrix products, and which of their arguments comes first in the product."""

# What selective recomputation keeps: the results that are dear to compute for their size (Korthikanti et al., "Reducing
# Activation Recomputation in Large Transformer Models", 2022, keeps all but attention; with flash attention that
# turns round: attention and matrix products are kept, the cheap element-wise chain between them is not). What ranks
# have added up for each other, or sent to experts, is dear too. What adapters of few ranks widen is not.
KEPT = frozenset(
    op
    for op in (
        *PRODUCTS,
        aten._grouped_mm.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        *VARLEN_OPS,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math.default,
    )
)


def _keep_dear_results(
    ranks: frozenset[int], ctx: object, op: Callable, *args: Any, **kwargs: object
) -> CheckpointPolicy:
    """Adapters' `ranks` are the inner widths of products that cost no more than the sums around them."""
    cheap = op in PRODUCTS and args[PRODUCTS[op]].shape[-1] in ranks
    return CheckpointPolicy.MUST_SAVE if op in KEPT and not cheap else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: nn.ModuleDict, policies: Sequence[Policy]) -> None:
    """Make blocks recompute their activations in the backward pass, by the policies of all of the model's layers;
    parameter names stay as they are."""
    adapted = [module for module in blocks.modules() if isinstance(module, LoraLinear)]
    random = any(module.dropout for module in adapted)
    keep = functools.partial(_keep_dear_results, frozenset(module.lora_a.shape[0] for module in adapted))
    whole: dict[str, object] = {"use_reentrant": False, "preserve_rng_state": random}
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    options = {"full": whole, "selective": whole | {"context_fn": contexts}}
    for layer, block in blocks.items():
        policy = policies[int(layer)]
        if policy != "none":
            block.forward = functools.partial(checkpoint, block.forward, **options[policy])


def hide_sharding(blocks: nn.ModuleDict) -> None:
    """Let selective recomputation not see what data parallelism does around modules inside a block.

    It compares a block's operations with those of the first time, and weights that are gathered already are not
    gathered again.
    """
    for block in blocks.values():
        inner = (module for module in block.modules() if module is not block and isinstance(module, FSDPModule))
        for module in inner:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                hooks.update({key: functools.partial(_unseen, hook) for key, hook in hooks.items()})


def _unseen(hook: Callable, *args: object) -> object:
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, selective._CachingTorchDispatchMode | selective._CachedTorchDispatchMode):
        return hook(*args)
    with _pop_mode_temporarily():
        return hook(*args)
