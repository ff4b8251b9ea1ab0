"""The one place that builds a model from its spec."""

import torch

from meshwright.models.decoder import Cache, Decoder
from meshwright.models.foreign import build_foreign
from meshwright.models.init import draw_rows, initialize, named_state, named_tensors
from meshwright.spec.model import ModelSpec

__all__ = ["Cache", "Decoder", "build_model", "draw_rows", "initialize", "named_state", "named_tensors"]


def build_model(spec: ModelSpec, *, device: str | torch.device = "meta", dtype: torch.dtype = torch.float32) -> Decoder:
    """The model with uninitialised parameters: no memory on `meta`, allocated but not drawn elsewhere.

    After `to_empty` and filling parameters and state (`draw_rows`, a checkpoint) it is complete.
    """
    if spec.foreign is not None:
        model = build_foreign(spec).to(dtype)
    else:
        with torch.device("meta"):
            model = Decoder(spec).to(dtype)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)
