"""Opening of served models: one base, and any number of adapters that share it."""

from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.models.dtypes import torch_dtype
from meshwright.models.packed import pack
from meshwright.serve.conversation import Prompts
from meshwright.serve.engine import Engine
from meshwright.serve.http import Served
from meshwright.serve.trained import TrainedModel, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.precision import FP32


def open_served(
    trained: TrainedModel, name: str, adapters: Mapping[str, Path], *, max_batch: int, max_context: int | None
) -> list[Served]:
    """The model under its name, and the runs of adapters under theirs.

    Raises `UserError` if a run holds no adapters of the same base, or a name is given twice.
    """
    if name in adapters:
        raise UserError(f"--adapter {name}=...: the model itself has this name; choose another name, or --name")
    pack(trained.model)  # adapters share the base's weights, in memory once
    others = {other: open_adapter(trained, path) for other, path in adapters.items()}
    return [
        serve_as(each, one, max_batch=max_batch, max_context=max_context)
        for one, each in {name: trained, **others}.items()
    ]


def serve_as(trained: TrainedModel, name: str, *, max_batch: int, max_context: int | None) -> Served:
    """One model with its engine."""
    tokenizer = trained.tokenizer
    return Served(
        name=name,
        engine=Engine(trained.model, decode=tokenizer.decode_text, max_batch=max_batch, max_context=max_context),
        tokenizer=tokenizer,
        prompts=Prompts(tokenizer),
        about=str(trained.source),
    )


def open_adapter(base: TrainedModel, path: Path) -> TrainedModel:
    """A run's model that shares the frozen weights of `base` in memory.

    Raises `UserError` if they differ.
    """
    trained = open_trained(path, device=base.device.type, dtype=_name_of(base.model.like.dtype))
    if not any(row.adapter for row in trained.model.table):
        raise UserError(f"{path} holds no adapters; serve it as a separate model")
    kept = dict(base.model.named_parameters())
    for name, parameter in trained.model.named_parameters():
        if parameter.requires_grad:
            continue
        if name not in kept or not _same(parameter, kept[name]):
            raise UserError(f"{path} holds adapters of another base than {base.source}: {name} differs")
        parameter.data = kept[name].data
    return trained


def default_name(trained: TrainedModel) -> str:
    """The default name of a model: its run's folder, or its own."""
    source = trained.source.resolve()
    return source.parents[1].name if source.parent.name == "checkpoints" else source.name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _name_of(dtype: torch.dtype) -> str:
    names = ("fp32", "bf16", "fp16", "fp64")
    return next((name for name in names if torch_dtype(name) == dtype), FP32.name)
