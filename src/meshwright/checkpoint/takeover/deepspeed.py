"""DeepSpeed's ZeRO checkpoints: reads the fp32 weights, which are sharded over ranks.

DeepSpeed's own zero_to_fp32.py unpickles them whole, and so runs any code in them; here they are read as plain tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.takeover.weights import load_plain
from meshwright.spec.errors import UserError

INERT = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes in optimizer states; their contents are not needed."""
LATEST, MODEL, OPTIMIZER = "latest", "*_model_states.pt", "*_optim_states.pt"
STATE, SHARED = "optimizer_state_dict", "shared_params"
FEWER_THAN_STAGE_3, STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
ALIGNMENT = "param_alignment_paddings"

Shapes = Mapping[str, Sequence[int]]


def is_zero_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or holds its checkpoints."""
    return (path / LATEST).is_file() or any(path.glob(MODEL))


def read_zero(path: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights by the names of the module that was trained.

    Raises `UserError` if files are missing, hold objects other than plain ones, or do not belong together.
    """
    folder = path
    if (path / LATEST).is_file():
        tag = (path / LATEST).read_text(encoding="utf-8").strip()
        folder = path / tag
        if Path(tag).name != tag or not folder.is_dir():
            raise UserError(f"{path / LATEST} names {tag!r}, but this folder does not exist beside it")
    models = [load_plain(file, INERT) for file in _in_order(folder, MODEL)]
    if not models:
        raise UserError(f"{folder}: contains no {MODEL}")
    if len({re.sub(r".*mp_rank_", "", file.name) for file in _in_order(folder, MODEL)}) > 1:
        raise UserError(f"{folder}: the model is split by tensor parallelism; only ZeRO checkpoints are supported")
    optimizers = [load_plain(file, INERT) for file in _in_order(folder, OPTIMIZER)]
    try:
        tensors = dict(_merged(models, [one[STATE] for one in optimizers], folder))
        for name, other in models[0].get(SHARED, {}).items():
            if other in tensors:
                tensors[name] = tensors[other]
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder}: is not a ZeRO checkpoint ({reason})") from error
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def _in_order(folder: Path, pattern: str) -> list[Path]:
    def number(file: Path) -> list[int]:
        return [int(word) for word in re.findall(r"\d+", file.name)]

    return sorted(folder.glob(pattern), key=number)


def _merged(models: list[Any], states: list[Any], folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not states:  # without ZeRO the weights are whole
        yield from models[0]["module"].items()
        return
    ranks = states[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if ranks != len(states):
        raise UserError(f"{folder}: was written by {ranks} ranks, but contains {len(states)} {OPTIMIZER}")
    buffers = set(models[0]["buffer_names"])
    yield from ((name, tensor.float()) for name, tensor in models[0]["module"].items() if name in buffers)
    stage_3 = STAGE_3 in states[0]
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in (models if stage_3 else models[:1])]
        yield name, _whole(parts, shape)
    if stage_3:
        shares = [torch.cat([group.flatten() for group in state[STAGE_3]]) for state in states]
        yield from _stage_3(
            shares, {name: shape for group in models[0]["param_shapes"] for name, shape in group.items()}
        )
        return
    groups = list(zip(*(state[FEWER_THAN_STAGE_3] for state in states), strict=True))
    paddings = states[0].get(ALIGNMENT) or [None] * len(groups)
    for shapes, shares, padding in zip(models[0]["param_shapes"], groups, paddings, strict=True):
        yield from _stage_2(shares, shapes, padding)


def _stage_2(
    shares: Sequence[torch.Tensor], shapes: Shapes, padding: Sequence[int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A group's parameters: concatenated, then cut into equal shares."""
    flat, offset = torch.cat(list(shares)), 0
    for number, (name, shape) in enumerate(shapes.items()):
        size = prod(shape)
        yield name, flat.narrow(0, offset, size).view(*shape)
        offset += size + (padding[number] if padding else 0)
    if not 0 <= flat.numel() - offset < 2 * 2 * len(shares):  # DeepSpeed rounds up to twice the ranks
        raise ValueError(f"only {offset} of {flat.numel()} values belong to parameters")


def _stage_3(shares: Sequence[torch.Tensor], shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, each cut into equal shares, the last one padded."""
    offset = 0
    for name, shape in shapes.items():
        share = -(-prod(shape) // len(shares))
        yield name, _whole([flat.narrow(0, offset, share) for flat in shares], shape)
        offset += share
    if offset != shares[0].numel():
        raise ValueError(f"only {offset} of {shares[0].numel()} values belong to parameters")


def _whole(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])[: prod(shape)].view(*shape).float()
