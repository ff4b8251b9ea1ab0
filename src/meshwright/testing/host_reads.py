"""Host synchronisations, found on a CPU: every operation with which a step would wait for a GPU."""

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

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
    "lift_fresh",
}
"""Operations of `aten` whose result, or whose shape, depends on values: the host waits for them. `lift_fresh` is a
tensor of the host's values (`torch.tensor`, `new_tensor`): a copy from pageable memory to the device."""

READS = {"tolist", "numpy", "cpu"}
"""Methods that read a tensor without such an operation."""


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Counts the places, as `trainer/step.py:__call__`, at which this process waits for a device, or would if the
    tensors were on one: forward, backward, recomputed. Places that only read tensors of the host are counted, too."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, function: Any) -> None:
        # A mode for functions of torch would not see backward passes.
        if event == "c_call" and function.__name__ in READS and isinstance(function.__self__, torch.Tensor):
            counts[_place(frame)] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with _Operations(counts):
            yield counts
    finally:
        sys.setprofile(before)


class _Operations(DispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace == "aten" and _waits(name, args, kwargs or {}):
            self._counts[_place(inspect.currentframe())] += 1
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return name.partition(".")[0] in WAITING or _by_mask(name, args)


def _by_mask(name: str, args: Any) -> bool:
    """Whether elements are chosen by a mask of booleans."""
    if name.partition(".")[0] not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _place(frame: FrameType | None) -> str:
    """The innermost function of this package, outside its tests' helpers, that called the operation."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.parent.name != "testing" and file.name != "torch_internals.py":
            return f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
