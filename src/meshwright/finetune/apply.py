"""The one place that does to a model what `families/adapters.py` does to its parameter table."""

import torch
from torch import nn

from meshwright.families import Adapter, find_adapters, finetuned_table
from meshwright.models import Decoder
from meshwright.models.adapters import LoraEmbedding, LoraLinear, ScaledLinear, extend, unchanged
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.model import Parameter


def apply_finetune(model: Decoder, finetune: FinetuneSpec, frozen_dtype: torch.dtype) -> None:
    """Add adapters to `model` (on the meta device) in place, and freeze what does not train.

    Frozen parameters are kept in `frozen_dtype`, that of the computation, for nothing has to be added to them; those
    that train stay in the model's dtype.
    """
    model.table = finetuned_table(model.spec, finetune)
    for adapter in find_adapters(model.spec, finetune):
        _add(adapter, model.get_submodule(adapter.module))
    for row in model.table:
        if not row.trained:
            path, _, name = row.name.rpartition(".")
            module = model.get_submodule(path)
            frozen = module.get_parameter(name).detach().to(frozen_dtype)
            module.register_parameter(name, nn.Parameter(frozen, requires_grad=False))


def _add(adapter: Adapter, module: nn.Module) -> None:
    weight = module.get_parameter("weight")
    parameters = {name_of(row): nn.Parameter(weight.new_empty(row.shape)) for row in adapter.rows()}
    if not adapter.rank:
        extend(module, ScaledLinear, **parameters, scales_input=adapter.scales_input)
    elif isinstance(module, nn.Embedding):
        extend(module, LoraEmbedding, **parameters, scale=adapter.scale)
    else:
        parameters.setdefault("magnitude", None)  # type: ignore[arg-type]
        extend(module, LoraLinear, **parameters, scale=adapter.scale, complete=unchanged)


def name_of(row: Parameter) -> str:
    """The parameter's name within its module."""
    return row.name.rpartition(".")[2]
