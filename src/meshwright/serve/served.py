"""Loading of served models: one base, any number of adapters that share it, and further models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.checkpoint.peft import read_adapter
from meshwright.checkpoint.peft_config import CONFIG, lora_of
from meshwright.families import FAMILIES
from meshwright.finetune import apply_finetune
from meshwright.models import build_model, named_state
from meshwright.models.dtypes import torch_dtype
from meshwright.models.from_disk import blocks_from_disk
from meshwright.models.packed import pack, release
from meshwright.serve.conversation import PromptEncoder
from meshwright.serve.endpoints import Served
from meshwright.serve.engine import InferenceEngine
from meshwright.serve.grammar import Grammars
from meshwright.serve.http import Load
from meshwright.serve.prefixes import Prefixes
from meshwright.serve.trained import TrainedModel, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.precision import FP32
from meshwright.trainer.device import free_all
from meshwright.trainer.weights import fingerprint_of


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of each served model's engine; see `InferenceEngine`."""

    max_batch: int
    max_context: int | None = None
    prefixes: Prefixes | None = None
    """Shared by all models."""


def open_served(
    trained: TrainedModel,
    name: str,
    adapters: Mapping[str, Path],
    room: Capacity,
    *,
    beside: Mapping[str, Path] | None = None,
    more: bool = True,
) -> list[Served]:
    """The model under its name, adapters under theirs, and the other models `beside` it. `more`: whether other adapters
    may be opened on it later.

    Raises `UserError` if an adapter belongs to another base, or if a name is given twice.
    """
    beside = beside or {}
    twice = next((other for other in (*adapters, *beside) if [name, *adapters, *beside].count(other) > 1), None)
    if twice is not None:
        raise UserError(f"name {twice} is given twice; choose another in --adapter, --beside or --name")
    if adapters:
        check_shared(trained)
    pack(trained.model)  # adapters share the base's weights, which are in memory once
    others = {other: open_adapter(trained, path) for other, path in adapters.items()}
    for other, path in beside.items():
        others[other] = open_trained(path, device=trained.device.type, dtype=_name_of(trained.model.like.dtype))
        pack(others[other].model)
        _release(others[other])
    if not adapters and not more:
        _release(trained)
    free_all()
    return [serve_as(each, one, room) for one, each in {name: trained, **others}.items()]


def _release(trained: TrainedModel) -> None:
    """Free weights that have copies, unless they are needed: a family of the user's is tested without a cache."""
    if trained.ranks is None and trained.spec.family in FAMILIES:
        release(trained.model)


def serve_as(trained: TrainedModel, name: str, room: Capacity) -> Served:
    """One model with its engine."""
    tokenizer = trained.tokenizer
    return Served(
        name=name,
        engine=InferenceEngine(
            trained.model,
            decode=tokenizer.decode_text,
            max_batch=room.max_batch,
            max_context=room.max_context,
            prefixes=room.prefixes,
        ),
        tokenizer=tokenizer,
        prompts=PromptEncoder(tokenizer),
        grammars=Grammars(tokenizer, trained.spec.vocab),
        about=str(trained.source),
    )


def loader_of(base: TrainedModel, folder: Path, room: Capacity) -> Load:
    """A function that opens adapters of `base` in `folder`, by name and path, while the server runs."""
    check_shared(base)
    inside = folder.resolve()

    def load(name: str, path: str) -> Served:
        if (place := _folder_in(inside, path)) is None:
            raise UserError(f"lora_path {path}: is not a folder in {folder}, from which this server loads adapters")
        return serve_as(open_adapter(base, place), name, room)

    return load


def _folder_in(inside: Path, path: str) -> Path | None:
    """The folder at `path`, if it is in the folder `inside`."""
    try:
        place = (inside / path).resolve()
        return place if place.is_relative_to(inside) and place.is_dir() else None
    except (OSError, ValueError):  # a name that no file can have: too long, with NUL
        return None


def check_shared(base: TrainedModel) -> None:
    """Raise `UserError` if adapters cannot share the base's weights, because the weights are on disk."""
    if blocks_from_disk(base.model) is not None:
        raise UserError(
            f"adapters share their base's weights in memory, but the weights of {base.source} are read from disk; "
            "serve the merged model (export --hf), or use a machine with more memory"
        )


def open_adapter(base: TrainedModel, path: Path) -> TrainedModel:
    """The model with the adapters of a run or of a peft folder; it shares the frozen weights of `base` in memory.

    Raises `UserError` if they belong to another base.
    """
    if (path / CONFIG).is_file():
        return _with_peft_adapter(base, path)
    trained = open_trained(path, device=base.device.type, dtype=_name_of(base.model.like.dtype))
    if not any(row.adapter for row in trained.model.table):
        raise UserError(f"{path} has no adapters; serve it as a separate model")
    kept = dict(base.model.named_parameters())
    for name, parameter in trained.model.named_parameters():
        if parameter.requires_grad:
            continue
        if name not in kept or not _same(parameter, kept[name]):
            raise UserError(f"{path} was trained on another base than {base.source}: {name} differs")
        parameter.data = kept[name].data
    return trained


@torch.no_grad()
def _with_peft_adapter(base: TrainedModel, folder: Path) -> TrainedModel:
    if any(row.adapter for row in base.model.table):
        raise UserError(f"{base.source} has adapters itself; serve its base, and these adapters with --adapter")
    finetune, dtype = lora_of(folder), base.model.like.dtype
    tensors = read_adapter(folder, base.spec, finetune, fingerprint=fingerprint_of(base.source))
    model = build_model(base.spec, dtype=dtype)
    apply_finetune(model, finetune, dtype)
    model.to_empty(device=base.device)
    shared = dict(base.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name in tensors:
            parameter.data = tensors[name].to(base.device, dtype)
        elif name in shared:
            parameter.data = shared[name].data
        else:
            raise UserError(f"{folder}: {base.source} has no unquantized {name}, which the adapters need")
    states = named_state(base.model)
    for name, tensor in named_state(model).items():
        tensor.copy_(states[name])
    return replace(base, source=folder, model=model.eval(), run=None)


def default_name(trained: TrainedModel) -> str:
    """The default name of a model: its run's folder, or its own."""
    source = trained.source.resolve()
    return source.parents[1].name if source.parent.name == "checkpoints" else source.name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _name_of(dtype: torch.dtype) -> str:
    names = ("fp32", "bf16", "fp16", "fp64")
    return next((name for name in names if torch_dtype(name) == dtype), FP32.name)
