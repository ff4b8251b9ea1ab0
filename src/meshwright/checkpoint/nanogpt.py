"""nanoGPT's `ckpt.pt`, as a Hugging Face directory; only plain tensors are read of it, and nothing is run."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.hf import export_hf
from meshwright.families import hf_tensors, parameter_table, resolve_model
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec, Parameter

SIZES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "hidden",
    "block_size": "max_positions",
    "vocab_size": "vocab",
}
COMPILED = "_orig_mod."
"""What torch.compile puts before the names."""


def convert_nanogpt(path: Path, out: Path) -> list[str]:
    """Write the weights of a nanoGPT checkpoint into the Hugging Face directory `out`, in fp32; returns what is not the
    same in it.

    Raises `UserError` if the file holds other objects than plain ones, or another model, or `out` exists.
    """
    found = _load(path)
    arguments, state = found.get("model_args"), found.get("model")
    if not isinstance(arguments, Mapping) or not isinstance(state, Mapping) or not SIZES.keys() <= arguments.keys():
        raise UserError(f"{path}: not a checkpoint of nanoGPT: it has no model_args and model")
    tensors = {str(name).removeprefix(COMPILED): tensor for name, tensor in state.items()}
    spec = resolve_model(_sizes(arguments, path), base_dir=Path())
    export_hf(_parameters(tensors, spec, path), spec, out, tokenizer_dir=None, dtype=torch.float32)
    notes = ["nanoGPT's GELU is exact, gpt2's its approximation by tanh: logits differ in the fourth digit"]
    if not arguments.get("bias", True):
        notes.append("the model has no biases: they are zeros, and training would change them")
    return notes


def _load(path: Path) -> Mapping[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        said = str(error).strip().splitlines() or ["it is damaged"]
        raise UserError(f"{path}: cannot be read as plain tensors (weights_only): {said[0][:200]}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{path}: not a checkpoint of nanoGPT: it has no model_args and model")
    return found


def _sizes(arguments: Mapping[str, Any], path: Path) -> ModelFields:
    sizes = {ours: arguments[theirs] for theirs, ours in SIZES.items()}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise UserError(f"{path}: its model_args are no sizes: {sizes}")
    return ModelFields(family="gpt2", **sizes)


def _parameters(tensors: Mapping[str, torch.Tensor], spec: ModelSpec, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Our parameters: nanoGPT's tensors have the names of Hugging Face's, and our orientation."""
    places = hf_tensors(spec)
    for row in parameter_table(spec):
        yield row.name, _rows(tensors, row, places[row.name].key, places[row.name].offset, path)


def _rows(tensors: Mapping[str, torch.Tensor], row: Parameter, key: str, offset: int, path: Path) -> torch.Tensor:
    tensor = tensors.get(key, tensors.get(f"transformer.{key}"))
    if tensor is None and key.endswith(".bias"):
        return torch.zeros(row.shape)
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{path}: it has no tensor {key}")
    found = tensor[offset : offset + row.shape[0]].float()
    if tuple(found.shape) != row.shape:
        raise UserError(f"{path}: {key} has the shape {list(tensor.shape)}, which its model_args do not say")
    return found
