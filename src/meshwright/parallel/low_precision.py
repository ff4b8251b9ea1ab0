"""Low-precision products in the layers that the recipe names, with common scales where a layer's tokens, inputs or
outputs are spread over several ranks.

Scales equal those of one process with the same microbatches. Context-parallel ranks share a microbatch's tokens.
Tensor-parallel ranks share the outputs of a column-wise matrix, the inputs of a row-wise one, and an expert's rows of a
microbatch. Maxima are reduced over all these ranks. Data-parallel ranks and pipeline stages have separate microbatches
and layers. Delayed scales come from the largest values over all ranks, once a step (`optim/delayed_scaling.py`).
"""

import functools
import math
from typing import Any

import torch

from meshwright.comm import collectives
from meshwright.families.low_precision import keeps_codes, low_precision_layers
from meshwright.families.split import TP_SPLITS, is_experts, split_dim
from meshwright.models import Decoder
from meshwright.models.dropout import Draws
from meshwright.models.grouped_low_precision import GroupedLowPrecision
from meshwright.models.linear import Linear
from meshwright.models.low_precision import RECIPES, ROLES, AmaxHistory, LastEncoded, LowPrecision, Past, Recipe
from meshwright.models.moe import ExpertLinear, MoE
from meshwright.parallel.mesh import Meshes
from meshwright.spec.errors import UserError
from meshwright.spec.training import TrainingSpec


def apply_low_precision(model: Decoder, training: TrainingSpec, meshes: Meshes | None = None) -> None:
    """Make the chosen layers of `model` (on the meta device) multiply in low precision, in place; without such layers
    in the recipe, do nothing."""
    if training.product_recipe is None:
        return
    recipe, low = RECIPES[training.product_recipe], training.low_precision
    rows = {row.name: row for row in model.table}
    if recipe.four_bits:
        model.draws = model.draws or Draws()
    modules, place = dict(model.named_modules()), 0
    shared = _readers(model, training)
    tp, cp = (None if meshes is None else meshes.axis(name) for name in ("tp", "cp"))
    for path in low_precision_layers(model.table, training):
        row, here = rows[f"{path}.weight"], place
        matrices = row.shape[0] if is_experts(row) else 1
        place += matrices * len(ROLES)
        if path not in modules:
            continue  # in another pipeline stage
        layer, history = modules[path], None
        last = None if recipe.delayed else shared.get(path)
        if recipe.delayed:
            history = AmaxHistory(low.amax_history, low.margin, here, matrices).train(layer.training)
            layer.register_module("scaling", history)  # registered, it learns whether the layer trains
        if isinstance(layer, ExpertLinear):
            layer.product = _of_experts(recipe, path, training.seed, history, _Sharers(meshes, matrices))
            layer.product.last = last
            for product in layer.product.products:
                product.keeps_codes = keeps_codes(row, training)
            continue
        if not isinstance(layer, Linear):
            raise UserError(
                f"training.precision={training.precision}: {path} is a {type(layer).__name__}, which does not use "
                f"meshwright.models.Linear; use it, or set training.low_precision.keep=[{path}]"
            )
        past = None if history is None else Past(history)
        product = LowPrecision(recipe, path, seed=training.seed, draws=model.draws, past=past)
        product.keeps_codes, product.last = keeps_codes(row, training), last
        layer.put(product)
        if recipe.delayed:
            continue
        if cp is not None:
            product.over["tokens"] = functools.partial(collectives.maximum, group=cp.get_group())
        split = None if tp is None else split_dim(row, model.spec, tp.size())
        if tp is not None and split is not None:
            assert row.dims[split] in TP_SPLITS
            product.over["out" if split == 0 else "in"] = functools.partial(collectives.maximum, group=tp.get_group())
            product.part = tp.get_local_rank() if split == 0 else 0
    if recipe.four_bits:
        for module in modules.values():
            if isinstance(module, MoE) and any(matrix.product is not None for matrix in module.experts.matrices):
                module.draws = model.draws


def _readers(model: Decoder, training: TrainingSpec) -> dict[str, LastEncoded[Any]]:
    """The shared codes of every layer that reads the same input as others: the layers of a module that read the same
    dim, such as queries, keys and values."""
    rows = {row.name: row for row in model.table}
    groups: dict[tuple[str, str], list[str]] = {}
    for path in low_precision_layers(model.table, training):
        groups.setdefault((path.rpartition(".")[0], rows[f"{path}.weight"].dims[-1]), []).append(path)
    shared = ((paths, LastEncoded[Any](len(paths))) for paths in groups.values() if len(paths) > 1)
    return {path: last for paths, last in shared for path in paths}


class _Sharers:
    """The ranks of a layer of experts: this rank's experts, and the ranks with rows of the same microbatch."""

    def __init__(self, meshes: Meshes | None, experts: int) -> None:
        ep = None if meshes is None else meshes.axis("ep")
        self.parts, self.part = (1, 0) if ep is None else (ep.size(), ep.get_local_rank())
        of_rank = experts // self.parts
        self.experts = range(self.part * of_rank, (self.part + 1) * of_rank)
        axes = () if meshes is None else [axis for axis in map(meshes.axis, ("cp", "tp")) if axis is not None]
        apart = math.prod(axis.size() for axis in axes) > self.parts
        self.groups = tuple(axis.get_group() for axis in axes) if apart else ()

    def maximum(self, maxima: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks that have the same experts and microbatch. Collective: these ranks call it for one
        of their experts each, in the same order; ranks with other experts have separate entries."""
        placed = maxima.new_zeros(self.parts, *maxima.shape)
        placed[self.part] = maxima
        for group in self.groups:
            placed = collectives.maximum(placed, group)
        return placed[self.part]


def _of_experts(
    recipe: Recipe, path: str, seed: int, history: AmaxHistory | None, sharers: _Sharers
) -> GroupedLowPrecision:
    products = []
    for expert in sharers.experts:
        past = None if history is None else Past(history, expert)
        products.append(LowPrecision(recipe, f"{path}.{expert}", seed=seed, past=past))
        if sharers.groups and past is None:
            products[-1].over["tokens"] = sharers.maximum
    return GroupedLowPrecision(products)
