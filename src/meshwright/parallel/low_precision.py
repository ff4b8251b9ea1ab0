"""Low-precision products: put into the layers that the recipe names, with common scales if a layer's tokens, inputs or
outputs are spread over several ranks.

Scales equal those of one process with the same microbatches. Context-parallel ranks share a microbatch's tokens;
tensor-parallel ranks share the outputs of a column-wise matrix and the inputs of a row-wise one: maxima are reduced
over these ranks. Data-parallel ranks and pipeline stages have microbatches and layers of their own. Delayed scales come
from the largest values over all ranks, once a step (`optim/delayed_scaling.py`).
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm import collectives
from meshwright.families.low_precision import low_precision_layers
from meshwright.families.split import TP_SPLITS, split_dim
from meshwright.models import Decoder
from meshwright.models.dropout import Draws
from meshwright.models.linear import Linear
from meshwright.models.low_precision import RECIPES, AmaxHistory, Dim, LowPrecision
from meshwright.spec.errors import UserError
from meshwright.spec.training import TrainingSpec


def apply_low_precision(
    model: Decoder, training: TrainingSpec, tp: DeviceMesh | None = None, cp: DeviceMesh | None = None
) -> None:
    """Let the chosen layers of `model` (on the meta device) multiply in low precision, in place; nothing if the
    recipe asks for none."""
    if training.product_recipe is None:
        return
    recipe, low = RECIPES[training.product_recipe], training.low_precision
    rows = {row.name: row for row in model.table}
    if recipe.four_bits:
        model.draws = model.draws or Draws()
    modules = dict(model.named_modules())
    for place, path in enumerate(low_precision_layers(model.table, training)):
        if path not in modules:
            continue  # it is another pipeline stage's
        layer = modules[path]
        if not isinstance(layer, Linear):
            raise UserError(
                f"training.precision={training.precision}: {path} is a {type(layer).__name__}, whose products are its "
                f"own; make it of meshwright.models.Linear, or set training.low_precision.keep=[{path}]"
            )
        history = None
        if recipe.delayed:
            history = AmaxHistory(low.amax_history, low.margin, place).train(layer.training)
            layer.register_module("scaling", history)  # there it learns whether the layer trains
        product = LowPrecision(recipe, path, seed=training.seed, draws=model.draws, history=history)
        layer.put(product)
        if recipe.delayed:
            continue
        if cp is not None:
            _spread(product, "tokens", cp)
        row = rows[f"{path}.weight"]
        split = None if tp is None else split_dim(row, model.spec, tp.size())
        if tp is not None and split is not None:
            assert row.dims[split] in TP_SPLITS
            _spread(product, "out" if split == 0 else "in", tp)
            product.part = tp.get_local_rank() if split == 0 else 0


def _spread(product: LowPrecision, dim: Dim, mesh: DeviceMesh) -> None:
    product.over[dim] = functools.partial(_over, mesh.get_group())


def _over(group: dist.ProcessGroup, maxima: torch.Tensor) -> torch.Tensor:
    return collectives.maximum(maxima, group)
