"""Tensors held by autograd's graph and by Python, read through private PyTorch APIs.

Used after an out-of-memory error, to report what held the memory. Each entry lists the tested releases and the public
alternative.
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import checkpoint

from meshwright.torch_internals import leaves


@dataclass(frozen=True)
class SavedByOperation:
    """The tensors that one operation of a graph keeps for its backward pass."""

    order: int
    """Operations that ran later have higher numbers."""
    name: str
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    """The parameters that it reads."""


def saved_for_backward(roots: Iterable[torch.Tensor]) -> Iterator[SavedByOperation]:
    """The tensors that operations behind `roots` still keep, in no order, without recomputed ones. The graph cannot be
    used afterwards: the saved tensors are read through hooks, which cannot be removed. 2.11-2.15; the hooks are public
    (PyTorch's notes on autograd), the number of an operation is not."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [other for other, _ in node.next_functions if other is not None]
        waiting += following
        read = [other.variable for other in following if hasattr(other, "variable")]
        yield SavedByOperation(node._sequence_nr(), node.name(), _saved_by(node), read)


def _saved_by(node: Any) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with contextlib.suppress(RuntimeError):  # freed
                raw = getattr(node, name)
                for saved in raw if isinstance(raw, list | tuple) else [raw]:
                    with contextlib.suppress(RuntimeError):  # freed, none, or recomputed
                        saved.register_hooks(keep, lambda tensor: tensor)
    return kept


def kept_by_recomputation() -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """(forward pass, the tensors kept to recompute it, and the recomputed ones) of every pass of `checkpoint` whose
    backward pass has not ended. 2.11-2.15; public: none."""
    for frame in gc.get_objects():
        if type(frame) is checkpoint._CheckpointFrame:
            function: Any = frame.recompute_fn
            names = function.__code__.co_freevars
            cells = dict(_filled(names, function.__closure__))
            storage = getattr(cells.get("recompute_context"), "storage", {})
            results = leaves(list(storage.values()))
            recomputed = [tensor for made in frame.recomputed.values() for tensor in made.values()]
            kept = leaves([_inputs_of(frame), [getattr(result, "val", result) for result in results], recomputed])
            yield cells.get("fn", cells.get("function")), [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]


def _filled(names: Iterable[str], cells: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned
            yield name, cell.cell_contents


def _inputs_of(frame: Any) -> Any:
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    saver = getattr(frame.input_saver, "grad_fn", None)
    return [] if saver is None else saver.saved_tensors


def all_tensors() -> list[torch.Tensor]:
    """Every tensor that Python holds. 2.11-2.15 let the garbage collector know them; public: none."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def record_allocations() -> None:
    """Let torch record every allocation on the GPU from here on, with the Python stack. 2.11-2.15; documented by
    PyTorch, but nowhere public."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)


def save_allocations(path: Path) -> None:
    """Write the record, and stop recording. 2.11-2.15; as above."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
