"""Conversion of other systems' checkpoints, by detected format, to a Hugging Face directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.checkpoint.takeover.deepspeed import is_zero_checkpoint, read_zero
from meshwright.checkpoint.takeover.litgpt import CONFIG, WEIGHTS, read_litgpt
from meshwright.checkpoint.takeover.megatron import is_megatron, read_megatron
from meshwright.checkpoint.takeover.nanogpt import is_nanogpt, read_nanogpt
from meshwright.checkpoint.takeover.torchtitan import is_dcp, read_torchtitan
from meshwright.checkpoint.takeover.weights import ForeignWeights, load_plain
from meshwright.families import family_of, hf_tensors, parameter_table, resolve_model, state_table
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec, Parameter

SYSTEMS = (
    "nanoGPT's ckpt.pt, LitGPT's lit_model.pth, and folders of DeepSpeed (ZeRO), torchtitan (DCP) and Megatron-core "
    "(torch_dist)"
)


def convert(path: Path, out: Path, model: str | None = None) -> tuple[str, ...]:
    """Write the weights of another system's checkpoint into the Hugging Face directory `out`, in fp32; returns notes on
    differences. `model` is a published name or a Hugging Face directory, for systems that do not store sizes.

    Raises `UserError` if the format is not supported, the checkpoint holds objects other than plain ones, or another
    model, or `out` exists.
    """
    weights = _read(path, model)
    export_hf(_rows(weights, path), weights.model, out, HfForm(dtype=torch.float32))
    return weights.notes


def _read(path: Path, model: str | None) -> ForeignWeights:
    if path.is_dir() and (path / WEIGHTS).is_file():
        path = path / WEIGHTS
    if path.is_file():
        if model:
            raise UserError(f"{path}: the checkpoint contains the model's sizes; leave --model out")
        if path.name == WEIGHTS or path.with_name(CONFIG).is_file():
            return read_litgpt(path)
        content = load_plain(path)
        if is_nanogpt(content):
            return read_nanogpt(content, path)
        raise UserError(
            f"{path}: is not a nanoGPT checkpoint (it has no model_args and model); supported are {SYSTEMS}"
        )
    zero = is_zero_checkpoint(path)
    if not zero and not is_dcp(path):
        raise UserError(f"{path}: contains no checkpoint of a known system; supported are {SYSTEMS}")
    if model is None:
        raise UserError(f"{path}: does not contain the model's sizes; give --model: a published name or directory")
    spec = resolve_model(ModelFields(name=model), base_dir=Path())
    if zero:
        return ForeignWeights(spec, read_zero(path))
    if is_megatron(path):
        return ForeignWeights(spec, *read_megatron(path, spec))
    return ForeignWeights(spec, read_torchtitan(path, spec))


def _rows(weights: ForeignWeights, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Our parameters. Raises `UserError` if a tensor is missing, has another shape, or is unknown."""
    model, used = weights.model, set[str]()
    places = hf_tensors(model)
    for row in parameter_table(model) + state_table(model):
        place = places[row.name]
        parts = [_tensor(weights.tensors, key, place.shape, row, path) for key in place.keys]
        used.update(place.keys)
        if place.experts is not None:
            count = len(place.parts)
            yield row.name, torch.stack([torch.cat(parts[i : i + count]) for i in range(0, len(parts), count)])
            continue
        whole = parts[0].t() if place.transposed else parts[0]
        yield row.name, whole[place.offset : place.offset + row.shape[0]]
    for key in weights.tensors.keys() - used:
        if not _is_second(key, weights.tensors, model):
            raise UserError(f"{path}: tensor {key} does not belong to a {model.family} of these sizes")


def _tensor(
    tensors: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...], row: Parameter, path: Path
) -> torch.Tensor:
    tensor = tensors.get(key)
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{path}: has no tensor {key}, which the model needs for {row.name}")
    if tuple(tensor.shape) != shape:
        raise UserError(f"{path}: {key} has shape {list(tensor.shape)}, but the model's has {list(shape)}")
    return tensor.float()


def _is_second(key: str, tensors: Mapping[str, torch.Tensor], model: ModelSpec) -> bool:
    """Whether a tensor is the head of a model whose head is its embedding, or a buffer that files may hold."""
    if key == "lm_head.weight" and model.tied_embeddings:
        embedding = next(row.name for row in parameter_table(model) if row.dims[0] == "vocab")
        return torch.equal(tensors[key], tensors[hf_tensors(model)[embedding].key])
    return model.foreign is None and key.endswith(family_of(model).hf_ignored)
