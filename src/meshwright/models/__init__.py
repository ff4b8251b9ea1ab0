"""Models, built from their specs."""

import torch

from meshwright.families import FAMILIES
from meshwright.families.plugged import own_model
from meshwright.models.attention import Attention
from meshwright.models.cache import Cache
from meshwright.models.decoder import Block, Decoder
from meshwright.models.feed_forward import FeedForward
from meshwright.models.foreign import build_foreign
from meshwright.models.init import draw_rows, initialize, named_state, named_tensors
from meshwright.models.linear import Linear
from meshwright.models.own import Model
from meshwright.spec.model import ModelSpec

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "Decoder",
    "FeedForward",
    "Linear",
    "Model",
    "build_model",
    "draw_rows",
    "initialize",
    "named_state",
    "named_tensors",
]


def build_model(spec: ModelSpec, *, device: str | torch.device = "meta", dtype: torch.dtype = torch.float32) -> Decoder:
    """The model with uninitialised parameters: no memory on `meta`, allocated but not drawn elsewhere.

    After `to_empty` and filling parameters and state (`draw_rows`, a checkpoint) it is complete.
    """
    if spec.foreign is not None:
        model = build_foreign(spec).to(dtype)
    elif spec.family not in FAMILIES:
        model = own_model(spec.family).build(spec).to(dtype)
    else:
        with torch.device("meta"):
            model = Decoder(spec).to(dtype)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)
