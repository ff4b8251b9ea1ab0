"""Model families: published sizes, parameter tables and Hugging Face names, all without torch."""

from meshwright.families.adapters import Adapter, count_trained, find_adapters, finetuned_table
from meshwright.families.hf_config import model_from_hf_config, model_to_hf_config
from meshwright.families.hf_tensors import hf_tensors
from meshwright.families.low_precision import (
    describe_low_precision,
    low_precision_layers,
    low_precision_misfits,
    low_precision_state,
)
from meshwright.families.registry import FAMILIES, PRESETS, family_of
from meshwright.families.resolve import pretrained_directory, read_hf_directory, resolve_model, starting_weights
from meshwright.families.table import active_parameters, parameter_table, state_table

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Adapter",
    "active_parameters",
    "count_trained",
    "describe_low_precision",
    "family_of",
    "find_adapters",
    "finetuned_table",
    "hf_tensors",
    "low_precision_layers",
    "low_precision_misfits",
    "low_precision_state",
    "model_from_hf_config",
    "model_to_hf_config",
    "parameter_table",
    "pretrained_directory",
    "read_hf_directory",
    "resolve_model",
    "starting_weights",
    "state_table",
]
