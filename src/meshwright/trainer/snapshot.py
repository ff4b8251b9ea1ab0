"""A step of a run in progress, on disk: its initial state, and every rank's results.

before/        the state, in the format of a checkpoint
values.json    everything else: step, loss scale, position in the data
after/R/KIND/NAME.npy   the part of a tensor that rank R holds after the step; equal parts are written once
after/index.json        the list of these files (`HeldTensor`), and the step's loss and gradient norm
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.checkpoint.dcp import in_model_order, load_tensors, local_part, plan_shards, write_index, write_shards
from meshwright.comm.objects import gather, gather_everywhere
from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.optim.adamw_8bit import read_state
from meshwright.trainer.replicas import checksum
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import own_tensors, random_state, state_values

BEFORE, AFTER, VALUES, INDEX = "before", "after", "values.json", "index.json"

Tensors = dict[tuple[str, str], torch.Tensor]
"""By kind (`weights`, `state` of buffers, `moments` of the optimizer) and name."""


@dataclass(frozen=True)
class HeldTensor:
    """A part of a tensor after the step."""

    kind: str
    name: str
    begin: tuple[int, ...]
    """Its offset in the whole tensor."""
    ranks: tuple[int, ...]
    """The ranks that hold it, bit-identical; the first one wrote it."""


def moments(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The optimizer's state on this rank as numbers: (NAME.KEY, the local part, the parameter)."""
    for bucket in trainer.store.buckets:
        for name, state in bucket.state.items():
            for key, moment in read_state(state).items():
                yield f"{name}.{key}", moment, bucket.parameters[name]


def results(trainer: Trainer) -> Iterator[tuple[str, str, torch.Tensor, tuple[int, ...]]]:
    """The results of a step on this rank: kind, name, this rank's part, and its offset in the whole tensor."""
    for name, parameter in trainer.parameters.items():
        yield "weights", name, shards.local(parameter.detach()), shards.begin_of(parameter)
    for name, buffer in named_state(trainer.model).items():
        yield "state", name, shards.local(buffer), shards.begin_of(buffer)
    for name, moment, parameter in moments(trainer):
        if not moment.dim() or moment.shape == shards.local(parameter).shape:  # else its layout is unknown
            yield "moments", name, moment, shards.begin_of(parameter) if moment.dim() else ()


def write_before(folder: Path, trainer: Trainer) -> None:
    """Write the state that the next step starts from, replacing the contents of `folder`. Collective."""
    if trainer.worker.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / BEFORE).mkdir(parents=True)
        (folder / VALUES).write_text(json.dumps(state_values(trainer)))
    tensors = _restored(trainer)
    plan = plan_shards(tensors)
    written = gather(write_shards(folder / BEFORE, plan, {name: local_part(one) for name, one in tensors.items()}))
    if written is not None:
        write_index(folder / BEFORE, plan, written)


def write_after(folder: Path, trainer: Trainer, figures: dict[str, float]) -> None:
    """Write every rank's results of the step, and its `figures`. Collective."""
    here = {(kind, name, begin): part for kind, name, part, begin in results(trainer)}
    holders: dict[Any, list[int]] = {}
    for rank, sums in enumerate(gather_everywhere({place: checksum(part) for place, part in here.items()})):
        for place, value in sums.items():
            holders.setdefault((place, value), []).append(rank)
    for (place, _), ranks in holders.items():
        if ranks[0] == trainer.worker.rank:
            save(here[place], file_of(folder, _held(place, ranks)))
    if gather(None) is not None:  # all have written
        held = [asdict(_held(place, ranks)) for (place, _), ranks in holders.items()]
        (folder / AFTER / INDEX).write_text(json.dumps({"held": held, **figures}))


def _held(place: tuple[str, str, tuple[int, ...]], ranks: list[int]) -> HeldTensor:
    kind, name, begin = place
    return HeldTensor(kind, name, begin, tuple(ranks))


def file_of(folder: Path, held: HeldTensor) -> Path:
    """The path of a part's file."""
    return folder / AFTER / str(held.ranks[0]) / held.kind / f"{held.name}.npy"


def save(tensor: torch.Tensor, file: Path) -> None:
    """Write a tensor; low precision is converted to fp32."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).numpy())


def read_index(folder: Path) -> tuple[list[HeldTensor], dict[str, float]]:
    """The contents of `write_after`: all parts, and the step's figures."""
    index = json.loads((folder / AFTER / INDEX).read_text())
    held = [HeldTensor(one["kind"], one["name"], tuple(one["begin"]), tuple(one["ranks"])) for one in index.pop("held")]
    return held, index


def restore_before(folder: Path, trainer: Trainer) -> None:
    """Restore in a trainer of any layout the state before the step. Collective."""
    load_tensors(folder / BEFORE, _restored(trainer))
    trainer.store.refresh()
    values = read_values(folder)
    if trainer.train_step.scaler is not None:
        trainer.train_step.scaler.load(values["loss_scale"])


def read_values(folder: Path) -> dict[str, Any]:
    """All values that are not tensors, as returned by `state_values`."""
    return json.loads((folder / VALUES).read_text())


def _restored(trainer: Trainer) -> dict[str, Any]:
    tensors = {name: tensor for name, tensor in own_tensors(trainer).items() if name not in random_state(trainer)}
    return in_model_order(tensors, trainer.arrangements)
