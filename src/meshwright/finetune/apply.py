"""The one place that does to a model what `families/adapters.py` does to its parameter table."""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import nn

from meshwright.families import Adapter, find_adapters, finetuned_table
from meshwright.families.adapters import module_of
from meshwright.models import Decoder
from meshwright.models.adapters import LoraEmbedding, LoraLinear, ScaledLinear, extend, unchanged
from meshwright.models.blockwise import load_kernels
from meshwright.models.quantized import QuantizedLinear
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.model import Parameter


def apply_finetune(model: Decoder, finetune: FinetuneSpec, frozen_dtype: torch.dtype) -> None:
    """Add adapters to `model` (on the meta device) in place, and freeze what does not train.

    Frozen parameters are kept in `frozen_dtype`, that of the computation, for nothing has to be added to them, or in
    few bits; those that train stay in the model's dtype.
    """
    model.table = finetuned_table(model.spec, finetune)
    dtype = model.like.dtype
    quantized = [row for row in model.table if row.storage != "float"]
    if quantized:
        load_kernels()
    for path, rows in groupby(quantized, key=module_of):
        _quantize(model.get_submodule(path), rows)
    for adapter in find_adapters(model.spec, finetune):
        _add(adapter, model.get_submodule(adapter.module), dtype)
    for row in model.table:
        if not row.trained and row.storage == "float":
            frozen = model.get_parameter(row.name)  # changed as it is: another module may share it
            frozen.data = frozen.data.to(frozen_dtype)
            frozen.requires_grad_(False)


def _quantize(module: nn.Module, rows: Iterable[Parameter]) -> None:
    """Put `rows` in the place of a linear layer's weight."""
    if not isinstance(module, nn.Linear):
        raise ValueError(f"finetune.base: {type(module).__name__} is no linear layer of torch's; use method: lora")
    others = dict(module._parameters)
    del others["weight"]
    module._parameters.clear()
    kept = {name_of(row): torch.empty(row.shape, dtype=getattr(torch, row.storage), device="meta") for row in rows}
    parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in kept.items()}
    extend(module, QuantizedLinear, **{**parameters, "groups": parameters.get("groups")})
    module._parameters.update(others)


def _add(adapter: Adapter, module: nn.Module, dtype: torch.dtype) -> None:
    shapes = {name_of(row): row.shape for row in adapter.rows()}
    parameters = {name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items()}
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"finetune.targets: {adapter.module} is a {type(module).__name__} and no linear layer of torch's"
        )
    if not adapter.rank:
        extend(module, ScaledLinear, **parameters, scales_input=adapter.scales_input)
    elif isinstance(module, nn.Embedding):
        extend(module, LoraEmbedding, **parameters, scale=adapter.scale)
    else:
        parameters.setdefault("magnitude", None)  # type: ignore[arg-type]
        settings = {"scale": adapter.scale, "dropout": adapter.dropout, "complete": unchanged}
        extend(module, LoraLinear, **parameters, **settings)


def name_of(row: Parameter) -> str:
    """The parameter's name within its module."""
    return row.name.rpartition(".")[2]
