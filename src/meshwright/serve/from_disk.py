"""Models larger than memory: their blocks stay in the files of a Hugging Face directory or a checkpoint.

Files are read with ordinary reads, not mapped. Beyond `models/from_disk.py`'s two blocks this takes one piece of a
tensor; the operating system caches as much of the files as fits into memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.hf import HfWeights
from meshwright.families import parameter_table, state_table
from meshwright.launch.memory import memory_free
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.models.from_disk import BlocksFromDisk, Fill, blocks_from_disk
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.trainer.out_of_memory import is_out_of_memory

PIECE = 16 * 2**20
"""Bytes of a tensor read at once."""
MOST = 0.8
"""Fraction of free memory that weights may take before they are left on disk."""
GB = 1e9


def is_to_stay_on_disk(weights: object, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are left on disk: if requested (`disk`), or if they do not fit into free memory (`auto`)."""
    requested = weights == "disk"
    if requested and device.type != "cpu":
        raise UserError("--weights-from-disk: works only on a CPU; leave it out, or add --device cpu")
    if requested and spec.foreign is not None:
        raise UserError("--weights-from-disk: does not support models that transformers computes; leave it out")
    if requested or weights != "auto" or device.type != "cpu" or spec.foreign is not None:
        return requested
    return sum(row.numel for row in parameter_table(spec)) * dtype.itemsize > MOST * memory_free()


def about_disk(model: Decoder) -> str:
    """A sentence about a model whose weights are on disk; empty for any other."""
    blocks = blocks_from_disk(model)
    if blocks is None:
        return ""
    return (
        f"weights are read from disk, {blocks.bytes_per_pass / GB:.3g} GB per generated token; prompts and answers "
        "in one batch share each read"
    )


def hf_model_from_disk(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model of a Hugging Face directory."""
    weights = HfWeights(directory, spec, mapped=False)
    rows = {row.name: row for row in (*parameter_table(spec), *state_table(spec))}

    @torch.no_grad()
    def fill(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            for start, stop in _pieces(rows[name]):
                tensor[start:stop].copy_(weights.read_rows(name, start, stop))

    return _opened(build_model(spec, dtype=dtype), fill)


def checkpoint_model_from_disk(checkpoint: Path, spec: ModelSpec, dtype: torch.dtype, prefix: str) -> Decoder:
    """The model of a verified checkpoint that contains all its weights. `prefix`: of trained weights' names there."""
    model = build_model(spec, dtype=dtype)
    trained = {name for name, _ in model.named_parameters()}

    def fill(tensors: Mapping[str, torch.Tensor]) -> None:
        load_tensors(
            checkpoint, {f"{prefix if name in trained else 'model.'}{name}": tensor for name, tensor in tensors.items()}
        )

    return _opened(model, fill)


def _opened(model: Decoder, fill: Fill) -> Decoder:
    BlocksFromDisk(model, fill)
    fill({name: tensor.detach() for name, tensor in named_tensors(model).items() if tensor.numel()})
    return model.eval()


@contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Inside, an out-of-memory error becomes a `UserError` that says what would fit."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{what} do not fit in memory ({memory_free() / GB:.3g} GB free); --weights-from-disk keeps two layers' "
            "weights in memory, --dtype bf16 halves weights and cache, and shorter or fewer answers need less cache"
        ) from error


def _pieces(row: Parameter) -> Iterable[tuple[int, int]]:
    count = row.shape[0]
    at_once = max(1, PIECE // max(1, 4 * row.numel // count))
    return ((start, min(start + at_once, count)) for start in range(0, count, at_once))
