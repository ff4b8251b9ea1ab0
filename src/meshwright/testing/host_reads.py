"""Host synchronisations, found on a CPU: every operation with which a step would wait for a GPU."""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.torch_internals import DispatchMode

PACKAGE = Path(__file__).resolve().parents[1]

WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
"""Operations of `aten` whose result, or whose shape, depends on values: the host waits for them."""

READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
"""Methods that read a tensor without such an operation."""

WRITES = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
"""Functions that make a tensor of the host's values: a copy from pageable memory to the device."""


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Counts the places, as `trainer/step.py:__call__`, at which this process waits for a device, or would if the
    tensors were on one. Places that only read tensors of the host are counted, too."""
    counts: Counter[str] = Counter()
    with _Methods(counts), _Operations(counts):
        yield counts


class _Operations(DispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace == "aten" and (
            name.partition(".")[0] in WAITING or _by_mask(name, args) or name == "repeat_interleave.Tensor"
        ):
            self._counts[_place()] += 1
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS or (function in WRITES and _moves(function, kwargs or {})):
            self._counts[_place()] += 1
        return function(*args, **(kwargs or {}))


def _moves(function: Any, kwargs: dict[str, Any]) -> bool:
    return function is torch.Tensor.new_tensor or kwargs.get("device") is not None


def _by_mask(name: str, args: Any) -> bool:
    """Whether elements are chosen by a mask of booleans."""
    if name.partition(".")[0] not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _place() -> str:
    """The innermost function of this package, outside its tests' helpers, that called the operation."""
    frame = inspect.currentframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.parent.name != "testing" and file.name != "torch_internals.py":
            return f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
