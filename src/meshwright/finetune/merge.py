"""Adapters merged into the weights they extend, dequantized where needed."""

import torch

from meshwright.models import Decoder, build_model, named_tensors
from meshwright.models.slots import Layer


@torch.no_grad()
def merged_model(model: Decoder) -> Decoder:
    """A model without adapters that computes what `model`, whole and on one device, does; its weights are copies."""
    like = model.like
    merged = build_model(model.spec, device=like.device, dtype=like.dtype)
    targets = named_tensors(merged)
    for name, tensor in named_tensors(model).items():
        if name in targets:
            targets[name].copy_(tensor)
    for path, module in model.named_modules():
        if isinstance(module, Layer):
            for name, tensor in module.merged().items():
                targets[f"{path}.{name}"].copy_(tensor)
    return merged.eval()
