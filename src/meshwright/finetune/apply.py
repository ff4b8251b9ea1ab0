"""Fine-tuning applied to a model, and adapters merged back into the weights they extend.

It fills slots of layers as `families/adapters.py` extends the parameter table.
"""

from itertools import groupby

import torch
from torch import nn

from meshwright.families import Adapter, find_adapters, finetuned_table
from meshwright.families.adapters import module_of
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.models.adapters import Lora, LoraRows, Scaled
from meshwright.models.blockwise import load_kernels
from meshwright.models.dropout import Draws, Dropout
from meshwright.models.dtypes import torch_dtype
from meshwright.models.embedding import Embedding
from meshwright.models.linear import Linear, is_linear, take_over
from meshwright.models.quantized import Quantized
from meshwright.models.slots import Layer
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.model import Parameter


def apply_finetune(model: Decoder, finetune: FinetuneSpec, frozen_dtype: torch.dtype, seed: int = 0) -> None:
    """Add adapters to `model` (on the meta device) in place, and freeze all other parameters.

    Frozen parameters are quantized, or stored in `frozen_dtype`, the dtype of the computation, because no updates are
    added to them. Trained parameters keep the model's dtype. `seed`: of dropout.
    """
    model.table = finetuned_table(model.spec, finetune)
    dtype = model.like.dtype
    quantized = [row for row in model.table if row.storage != "float"]
    if quantized:
        load_kernels()
    for path, rows in groupby(quantized, key=module_of):
        _quantize(model, path, list(rows))
    for adapter in find_adapters(model.spec, finetune):
        _add(adapter, model, dtype, seed)
    for row in model.table:
        if not row.trained and row.storage == "float":
            frozen = model.get_parameter(row.name)  # not in place: another module may share the object
            frozen.data = frozen.data.to(frozen_dtype)
            frozen.requires_grad_(False)


def linear_at(model: nn.Module, path: str, setting: str) -> Linear:
    """The linear layer at `path` with slots: where transformers built the model, its `nn.Linear` gives its place among
    its parent's children, and its parameters, to one of ours.

    Raises:
        UserError: no linear layer is there.
    """
    module = model.get_submodule(path)
    if isinstance(module, Linear):
        return module
    if not isinstance(module, nn.Linear) or not is_linear(module):
        raise UserError(f"{setting}: {path} is a {type(module).__name__}, which is not a linear layer; leave it out")
    ours, (parent, _, name) = take_over(module), path.rpartition(".")
    model.get_submodule(parent).register_module(name, ours)
    return ours


def _quantize(model: Decoder, path: str, rows: list[Parameter]) -> None:
    """Put `rows` instead of a linear layer's weight."""
    layer = linear_at(model, path, "finetune.base")
    others = dict(layer._parameters)
    del others["weight"]
    layer._parameters.clear()
    for row in rows:
        kept = torch.empty(row.shape, dtype=torch_dtype(row.storage), device="meta")
        layer.register_parameter(name_of(row), nn.Parameter(kept, requires_grad=False))
    layer._parameters.update(others)
    layer.put(Quantized("int8" if rows[0].storage == "int8" else "NF4", (layer.out_features, layer.in_features)))


def _add(adapter: Adapter, model: Decoder, dtype: torch.dtype, seed: int) -> None:
    module = model.get_submodule(adapter.module)
    layer = module if isinstance(module, Embedding) else linear_at(model, adapter.module, "finetune.targets")
    for row in adapter.rows():
        layer.register_parameter(name_of(row), nn.Parameter(torch.empty(row.shape, dtype=dtype, device="meta")))
    if not adapter.rank:
        layer.put(Scaled(scales_input=adapter.scales_input))
    elif isinstance(layer, Embedding):
        layer.put(LoraRows(adapter.scale))
    else:
        dropout = None
        if adapter.dropout:
            model.draws = model.draws or Draws()
            dropout = Dropout(adapter.dropout, model.draws, seed, adapter.module).train(layer.training)
            layer.register_module("dropout", dropout)  # there it learns whether the layer trains
        layer.put(Lora(adapter.scale, dropout))


def name_of(row: Parameter) -> str:
    """The parameter's name within its module."""
    return row.name.rpartition(".")[2]


@torch.no_grad()
def merged_model(model: Decoder) -> Decoder:
    """A model without adapters that computes what `model`, whole and on one device, does. Its weights are copies,
    dequantized where needed."""
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
