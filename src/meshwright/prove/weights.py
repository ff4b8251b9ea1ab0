"""Weights of a proof: noise replaces a fresh model's constants, because a constant hides which rank computed with it.

Norm weights of one are equal on every rank under any split, an adapter initialized to zero passes no gradient on, and a
fresh router loads experts evenly.
"""

from dataclasses import replace

import torch

from meshwright.models.init import draw_rows
from meshwright.parallel.materialize import RowSource
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import run_weights

NOISE = 0.2
"""Standard deviation of the noise added to constants."""

ADAPTER_NOISE = 0.05
"""The same for the zero matrix of an adapter, whose output is then about as large as its base's. Four times as much
saturates attention, and its rounding exceeds the tolerances."""

LOUD, QUIET = 2.0, 0.1
"""Factor of every other expert's routing weights, so that half of the experts get most tokens."""


def proof_weights(resolved: ResolvedRun) -> RowSource:
    """The run's weights with noise added to constants and with uneven routers. Pretrained weights, except adapters,
    stay unchanged. Collective if they come from a checkpoint."""
    weights, drawn = run_weights(resolved), resolved.run.model.weights != "pretrained"

    def read(row: Parameter, start: int, stop: int) -> torch.Tensor:
        values = weights(row, start, stop)
        if row.storage != "float" or not (drawn or row.adapter):
            return values
        if row.name.endswith("router.weight"):
            return values * _by_expert(start, stop).unsqueeze(1)
        constant = row.init in ("ones", "zeros") or (row.adapter and row.init == "row_norms")
        return values + _noise(row, start, stop).to(values) if constant else values

    return read


def _noise(row: Parameter, start: int, stop: int) -> torch.Tensor:
    size = ADAPTER_NOISE if row.adapter and row.init == "zeros" else NOISE
    return draw_rows(replace(row, init="normal", init_std=size), 0, start, stop)


def _by_expert(start: int, stop: int) -> torch.Tensor:
    return torch.where(torch.arange(start, stop) % 2 == 0, LOUD, QUIET)
