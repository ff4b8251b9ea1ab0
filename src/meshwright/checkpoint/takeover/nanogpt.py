"""nanoGPT's `ckpt.pt`; only plain tensors are read, and no code is run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.takeover.weights import ForeignWeights
from meshwright.families import hf_tensors, resolve_model
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.problems import foreign_problems, read_foreign

SIZES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "hidden",
    "block_size": "max_positions",
    "vocab_size": "vocab",
}
COMPILED = "_orig_mod."
"""The prefix that torch.compile adds to names."""


def is_nanogpt(content: Mapping[str, Any]) -> bool:
    """Whether a file of tensors is nanoGPT's."""
    arguments = content.get("model_args")
    return (
        isinstance(arguments, Mapping)
        and isinstance(content.get("model"), Mapping)
        and SIZES.keys() <= arguments.keys()
    )


def read_nanogpt(content: Mapping[str, Any], path: Path) -> ForeignWeights:
    """The weights of a nanoGPT checkpoint.

    Raises `UserError` if its tensors do not match the model that it describes.
    """
    arguments, state = content["model_args"], content["model"]
    tensors = {str(name).removeprefix(COMPILED): tensor for name, tensor in state.items()}
    spec = _model(arguments, path)
    notes = ["nanoGPT's GELU is exact, gpt2's is the tanh approximation: logits differ in the fourth digit"]
    if not arguments.get("bias", True):
        notes.append("the model has no biases: they are set to zero, and training would change them")
    return ForeignWeights(spec, dict(_stored(tensors, spec, path)), tuple(notes))


def _model(arguments: Mapping[str, Any], path: Path) -> ModelSpec:
    values = {"family": "gpt2", **{ours: arguments[theirs] for theirs, ours in SIZES.items()}}
    names = {ours: f"model_args.{theirs}" for theirs, ours in SIZES.items()}
    fields = read_foreign(ModelFields, values, where=str(path), names=names)
    with foreign_problems(ModelFields, values, where=str(path), names=names):
        return resolve_model(fields, base_dir=Path())


def _stored(tensors: Mapping[str, torch.Tensor], spec: ModelSpec, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's tensors: nanoGPT's names are the same, and no matrix is transposed."""
    for place in {place.key: place for place in hf_tensors(spec).values()}.values():
        key, shape = place.key, place.shape[::-1] if place.transposed else place.shape
        tensor = tensors.get(key, tensors.get(f"transformer.{key}"))
        if tensor is None and key.endswith(".bias"):
            tensor = torch.zeros(shape)
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: has no tensor {key}")
        if tuple(tensor.shape) != shape:
            raise UserError(f"{path}: {key} has shape {list(tensor.shape)}, which does not match model_args")
        yield key, tensor.t() if place.transposed else tensor
