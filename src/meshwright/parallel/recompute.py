"""Activation recomputation: which of a block's activations are kept and which are recomputed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright import torch_internals
from meshwright.comm.collectives import functional
from meshwright.models.adapters import Lora
from meshwright.models.cpu_kernels import MATMULS
from meshwright.models.slots import Compute, Layer, Wrapped
from meshwright.spec.recompute import Policy

aten = torch.ops.aten

PRODUCTS: dict[Any, int] = {**dict.fromkeys((aten.mm.default, aten.bmm.default, *MATMULS), 0), aten.addmm.default: 1}
"""Matrix products, and the index of their left operand among the arguments."""

# Selective recomputation keeps the results that are expensive to compute for their size. Korthikanti et al., "Reducing
# Activation Recomputation in Large Transformer Models", 2022, keep all but attention. With flash attention it is the
# reverse: attention and matrix products are kept, the cheap element-wise operations between them are recomputed.
# Results of reductions and of exchanges between ranks are kept too; products with adapters of low rank are not.
EXCHANGES = functional.all_to_all_single.default, functional.reduce_scatter_tensor.default
KEPT = frozenset((*PRODUCTS, *EXCHANGES, *torch_internals.EXPENSIVE_OPS))


def _keep_expensive_results(
    ranks: frozenset[int], ctx: object, op: Callable, *args: Any, **kwargs: object
) -> CheckpointPolicy:
    """Products whose inner width is in adapters' `ranks` are as cheap as the additions around them."""
    cheap = op in PRODUCTS and args[PRODUCTS[op]].shape[-1] in ranks
    return CheckpointPolicy.MUST_SAVE if op in KEPT and not cheap else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed:
    """A forward pass that the backward pass recomputes: all of it, or the part that selective recomputation drops."""

    def __init__(self, policy: Policy, options: dict[str, Any]) -> None:
        self.policy, self.options = policy, options

    def __call__(self, compute: Compute) -> Compute:
        """`compute` under the policy."""
        return functools.partial(checkpoint, compute, **self.options)

    def __repr__(self) -> str:
        return f"recompute {self.policy}"


def apply_recompute(blocks: nn.ModuleDict, policies: Sequence[Policy]) -> None:
    """Make blocks recompute their activations in the backward pass, by the policies of all of the model's layers."""
    layers = (module for module in blocks.modules() if isinstance(module, Layer))
    adapters = [layer for layer in layers if layer.find(Lora)]
    ranks = frozenset(layer.get_parameter("lora_a").shape[0] for layer in adapters)
    whole: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_keep_expensive_results, ranks)
    )
    options = {"full": whole, "selective": whole | {"context_fn": contexts}}
    for layer, block in blocks.items():
        policy = policies[int(layer)]
        if policy != "none":
            assert isinstance(block, Wrapped)
            block.wrap(Recomputed(policy, options[policy]))


def hide_sharding(blocks: nn.ModuleDict) -> None:
    """Hide data parallelism's hooks around modules inside a block from selective recomputation.

    Selective recomputation compares a block's operations with the original forward pass, but weights that are already
    gathered are not gathered a second time.
    """
    for block in blocks.values():
        inner = (module for module in block.modules() if module is not block and isinstance(module, FSDPModule))
        for module in inner:
            torch_internals.replace_hooks(module, torch_internals.apart_from_recompute)
