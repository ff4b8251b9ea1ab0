"""Adapters in peft's format: the tensors of `adapter_model.safetensors`.

A tensor's key is `base_model.model.`, the Hugging Face name of its module, and peft's name of the parameter.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.checkpoint.peft_config import (
    CONFIG,
    AdapterError,
    AdapterSpec,
    adapter_config,
    check_adapter_config,
    hf_module,
    tied_head,
)
from meshwright.checkpoint.tensor_files import DTYPES, open_tensors
from meshwright.families import Adapter, find_adapters, finetuned_table, hf_tensors
from meshwright.families.tensor_headers import read_header
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.problems import did_you_mean
from meshwright.storage.durable import complete_folder

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "factors": "ia3_l",
}
EMBEDDING_NAMES = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
"""Our parameters -> peft's names."""
BASE, DIGEST = "meshwright_base", "meshwright_sha256"
"""Keys of the file's metadata: the fingerprint of the adapter's base, and the digest of its tensors."""


@dataclass(frozen=True)
class Base:
    """The model that an adapter extends."""

    name: str | None
    """The value of `base_model_name_or_path`."""
    fingerprint: str
    """Of its weights, so that the adapter is not resumed on another base."""


@dataclass(frozen=True)
class Stored:
    """The place of one of our parameters in an adapter's file."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False

    def to_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """Our tensor in the stored form."""
        return (tensor.t() if self.transposed else tensor).reshape(self.shape).contiguous()

    def from_file(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The stored tensor as ours, of `shape`."""
        return (stored.t() if self.transposed else stored).reshape(shape)


def write_adapter(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    model: ModelSpec,
    finetune: AdapterSpec,
    base: Base,
    *,
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Write all trained parameters as an adapter that peft can load; the directory appears complete or not at all.

    Args:
        tensors: every trained row of the table, by our names, whole.
        prove: called with the files' path; if it raises, nothing is written.

    Raises `UserError` if the directory exists or peft has no names for this adapter.
    """
    places = stored_places(model, finetune)
    config = adapter_config(model, finetune, base.name)
    stored = {place.key: place.to_file(tensors[name].detach().cpu()) for name, place in places.items()}
    if keys := tied_keys(model, finetune):
        stored[keys[1]] = stored[keys[0]].clone()
    with complete_folder(directory) as staging:
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        metadata = {"format": "pt", BASE: base.fingerprint, DIGEST: _digest(stored)}
        save_file(stored, staging / WEIGHTS, metadata=metadata)
        if prove is not None:
            prove(staging)


def read_adapter(
    directory: Path, model: ModelSpec, finetune: AdapterSpec, *, fingerprint: str
) -> dict[str, torch.Tensor]:
    """The tensors of a peft adapter by our names, whole, on the CPU.

    Raises `AdapterError` if a file is missing or damaged, the adapter is of another kind than the recipe's, or it was
    made for another base.
    """
    check_adapter_config(directory, model, finetune)
    file = directory / WEIGHTS
    header = read_header(file)
    places, shapes = stored_places(model, finetune), {row.name: row.shape for row in finetuned_table(model, finetune)}
    keys, tied = {place.key for place in places.values()}, tied_keys(model, finetune)
    if tied and tied[1] in header:
        keys.add(tied[1])
    strange = [key for key in header if key not in keys and not key.endswith(".base_layer.weight")]
    for key in strange:
        raise AdapterError(f"{file}: tensor {key} does not belong to the recipe's adapter{did_you_mean(key, keys)}")
    for name, place in places.items():
        if place.key not in header:
            raise AdapterError(f"{file} has no tensor {place.key}, which the recipe's adapter needs for {name}")
        if header[place.key].shape != place.shape:
            raise AdapterError(
                f"{file}: tensor {place.key} has shape {list(header[place.key].shape)}, but this base and recipe "
                f"need {list(place.shape)}; the adapter was trained on another base"
            )
        if header[place.key].dtype not in DTYPES:
            raise AdapterError(f"{file}: tensor {place.key} is {header[place.key].dtype}, not a floating-point type")
    with open_tensors(file) as stored:
        tensors = {key: stored.get_tensor(key) for key in keys}
        metadata = stored.metadata() or {}
    if metadata.get(DIGEST, digest := _digest(tensors)) != digest:
        raise AdapterError(f"{file} is damaged: its tensors do not match their checksum")
    if metadata.get(BASE, fingerprint) != fingerprint:
        raise AdapterError(
            f"{directory} was trained on another base ({metadata[BASE]}) than the recipe's ({fingerprint})"
        )
    if tied:
        _check_tied(directory, tensors, tied, ours=BASE in metadata)
    return {name: place.from_file(tensors[place.key], shapes[name]) for name, place in places.items()}


def tied_keys(model: ModelSpec, finetune: AdapterSpec) -> tuple[str, str] | None:
    """Keys of embedding and head in an adapter's file, if they are tied and trained; else None."""
    head = tied_head(model, finetune)
    if head is None:
        return None
    embedding = next(row.name for row in finetuned_table(model, finetune) if row.dims[0] == "vocab" and row.trained)
    return f"{PREFIX}{hf_tensors(model)[embedding].key}", f"{PREFIX}{head}.weight"


def _check_tied(directory: Path, tensors: Mapping[str, torch.Tensor], tied: tuple[str, str], *, ours: bool) -> None:
    """Raise `AdapterError` if peft's head differs from the embedding, to which it is tied here.

    `ours`: written by Meshwright; its earlier versions left out the head.
    """
    embedding, head = tied
    if head in tensors:
        if not torch.equal(tensors[head], tensors[embedding]):
            raise AdapterError(
                f"{directory}: {head} and {embedding} differ, but in this model they are one matrix (tied); "
                "merge the adapter in peft and train the merged model"
            )
        return
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if not ours and not config.get("ensure_weight_tying"):
        raise AdapterError(
            f"{directory}: peft trained {embedding} but not the head, but in this model they are one matrix (tied); "
            "merge the adapter in peft and train the merged model"
        )


def stored_places(model: ModelSpec, finetune: AdapterSpec) -> dict[str, Stored]:
    """The place of every trained parameter in an adapter's file, by our names."""
    places: dict[str, Stored] = {}
    for adapter in find_adapters(model, finetune):
        module = hf_module(model, adapter)
        for row in adapter.rows():
            places[row.name] = _place(adapter, row, module)
    for row in finetuned_table(model, finetune):
        if row.trained and not row.adapter:
            place = hf_tensors(model)[row.name]
            if place.experts is not None or place.offset or len(place.shape) != len(row.shape):
                raise UserError(f"{row.name} cannot be stored in a peft adapter; leave it out of finetune.train")
            places[row.name] = Stored(PREFIX + place.key, place.shape, place.transposed)
    return places


def _place(adapter: Adapter, row: Parameter, module: str) -> Stored:
    name = row.name.rpartition(".")[2]
    if "vocab" in adapter.weight.dims[:1] and row.dims[-1] == "rank" and adapter.module == "tok_embeddings":
        transposed = name == "lora_a"
        shape = row.shape[::-1] if transposed else row.shape
        return Stored(f"{PREFIX}{module}.{EMBEDDING_NAMES[name]}", shape, transposed)
    shape = row.shape
    if name == "factors":
        shape = (1, *row.shape) if adapter.scales_input else (*row.shape, 1)
    return Stored(f"{PREFIX}{module}.{NAMES[name]}", shape)


def _digest(stored: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(stored):
        digest.update(key.encode())
        digest.update(stored[key].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
