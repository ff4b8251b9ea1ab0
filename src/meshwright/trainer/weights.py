"""The one place that says where the weights that a run begins with come from."""

from pathlib import Path

import torch

from meshwright.checkpoint.hf import HfWeights
from meshwright.families import finetuned_table, parameter_table, pretrained_directory
from meshwright.models.init import draw_rows
from meshwright.models.quantized import QuantizedRows
from meshwright.parallel.materialize import RowSource
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun


def run_weights(resolved: ResolvedRun) -> RowSource:
    """The weights of a fresh run: the base's, as they are kept, and adapters as they are drawn."""
    base, table = base_weights(resolved), finetuned_table(resolved.model, resolved.run.finetune)
    return with_adapters(QuantizedRows(base, parameter_table(resolved.model), table), resolved)


def base_weights(resolved: ResolvedRun) -> RowSource:
    """The weights without adapters: drawn, or of the Hugging Face directory that the recipe names."""
    fields, seed = resolved.run.model, resolved.run.training.seed
    if fields.weights == "random":
        return lambda parameter, start, stop: draw_rows(parameter, seed, start, stop)
    directory = pretrained_directory(fields, base_dir=Path(resolved.base_dir))
    assert directory is not None  # else the model would not have resolved
    pretrained = HfWeights(directory, resolved.model)
    return lambda parameter, start, stop: pretrained.read_rows(parameter.name, start, stop)


def with_adapters(base: RowSource, resolved: ResolvedRun) -> RowSource:
    """Adapters' rows drawn, or, where they begin as the lengths of a weight's rows, computed from the base."""
    seed = resolved.run.training.seed
    weights = {row.name: row for row in parameter_table(resolved.model)}

    def read(parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        if not parameter.adapter:
            return base(parameter, start, stop)
        if parameter.init != "row_norms":
            return draw_rows(parameter, seed, start, stop)
        weight = weights[f"{parameter.name.rpartition('.')[0]}.weight"]
        rows = base(weight, start, stop)
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))

    return read
