"""A timeline of memory: every allocation and release of a step, with its kind, phase and module."""

import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.parallel.ledger import Ledger, Storages
from meshwright.torch_internals import in_backward_pass

FORWARD, BACKWARD, STEP, BETWEEN = "forward", "backward", "optimizer's step", "between"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
NAMED_EVERY = 100
"""Allocations and releases between two updates of the storages' kinds."""
POINTS = 400
"""Points of a timeline, each the maximum of its interval."""
LARGEST, LARGEST_OF_KIND = 20, 5
"""Largest tensors that a report names: of all, and at least of each kind."""


@dataclass
class _Storage:
    """A storage and its owner."""

    made_in: str
    """Phase."""
    place: str
    """The module that computed."""
    what: str = ""
    """Operation, shape and dtype."""
    kind: str = ""
    name: str = ""
    """The name of a weight, a gradient or a state."""
    size: int = 0


class RecordingLedger(Ledger):
    """A ledger that remembers every change."""

    def __init__(
        self,
        name_storages: Callable[[], Storages],
        model: nn.Module,
        *,
        device_type: str | None = None,
        tensor_names: Callable[[], Storages] = dict,
        elsewhere: Container[int] = (),
    ) -> None:
        """`device_type`: the device whose memory is counted; None for all. `tensor_names`: the names of storages that
        live at the end. `elsewhere`: as in `Ledger`."""
        super().__init__(name_storages, elsewhere, model)
        self.device_type, self._tensor_names = device_type, tensor_names
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._places: list[str] = []
        self._stepping = False
        self._phase = BETWEEN
        self._began = time.perf_counter()
        self._number: dict[int, int] = {}  # identity of a storage that lives -> its number
        self._storages: list[_Storage] = []
        self._events: list[tuple[float, int, int, str, str]] = []  # seconds, number, bytes, phase, place
        self._standing = 0
        """Events of storages that existed at the begin."""
        self._handles: list[Any] = []
        self._unnamed = False

    def __enter__(self) -> "RecordingLedger":
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._begin_step(True)),
            register_optimizer_step_post_hook(lambda *_: self._begin_step(False)),
        ]
        before = {event[1]: event for event in self._events}
        self._events = [(0.0, *event[1:]) for event in before.values() if event[2]]  # existing storages
        self._standing = len(self._events)
        self._began = time.perf_counter()
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self._name()
        for key, name in self._tensor_names().items():
            if (number := self._number.get(key)) is not None:
                self._storages[number].name = name
        for handle in self._handles:
            handle.remove()

    def counts(self, storage: torch.UntypedStorage) -> bool:
        return self.device_type in (None, storage.device.type)

    def made(self, tensor: torch.Tensor, operation: Any) -> None:
        number = self._number.get(id(tensor.untyped_storage()))
        if number is not None:
            shape = " x ".join(map(str, tensor.shape))
            name = operation.name().partition("::")[2].partition(".")[0].strip("_")
            self._storages[number].what = f"{name} [{shape}, {str(tensor.dtype).removeprefix('torch.')}]"

    def changed(self, key: int, size: int) -> None:
        """See `Ledger`.

        Nothing is named during the release of a storage: its tensor is half destroyed, and reading it (for example as
        the gradient of a parameter) crashes the process.
        """
        phase, released = self._now_in(), key not in self._bytes
        if phase != self._phase:
            if phase == BACKWARD:  # kept by the forward pass for this one
                for number in self._number.values():
                    storage = self._storages[number]
                    if storage.made_in == FORWARD and not storage.kind:
                        storage.kind = ACTIVATIONS
            self._phase, self._unnamed = phase, True
        place = self._places[-1] if self._places else ""
        if key not in self._number:
            self._number[key] = len(self._storages)
            self._storages.append(_Storage(phase, place))
        number = self._number[key]
        self._storages[number].size = max(size, self._storages[number].size)
        self._events.append((time.perf_counter() - self._began, number, size, phase, place))
        self._unnamed |= len(self._events) % NAMED_EVERY == 0
        if released:
            del self._number[key]
        elif self._unnamed:
            self._name()

    def _now_in(self) -> str:
        if in_backward_pass():
            return BACKWARD
        if self._stepping:
            return STEP
        return FORWARD if self._places else BETWEEN

    def _name(self) -> None:
        """Update the kinds of the storages."""
        self._unnamed = False
        for key, kind in self.name_storages().items():
            number = self._number.get(key)
            if number is not None and self._storages[number].kind in ("", ACTIVATIONS):
                self._storages[number].kind = kind

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._places.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        if self._places:
            self._places.pop()

    def _begin_step(self, begins: bool) -> None:
        self._stepping = begins
        self._name()

    def report(self) -> dict[str, Any]:
        """The timeline as JSON values: `points`, each the maximum of its interval of the step, and the `peak`: its
        time, bytes by kind, activations by module, and the largest tensors."""
        totals, sizes, points = Counter[str](), Counter[int](), list[dict[str, Any]]()
        most, peak = -1, {}
        every = max(1, (len(self._events) - self._standing) // POINTS)
        for index, (seconds, number, size, phase, place) in enumerate(self._events):
            storage = self._storages[number]
            totals[storage.kind or TEMPORARIES] += size - sizes[number]
            sizes[number] = size
            if index + 1 < self._standing:
                continue
            total = sum(totals.values())
            if index % every == 0 or not points:
                points.append({"total": -1})
            if total > points[-1]["total"]:
                points[-1] = {"total": total, "seconds": seconds, "phase": phase, "place": place}
                points[-1] |= {"index": index, "kinds": +totals}
            if total > most:
                most, peak = total, {"seconds": seconds, "phase": phase, "place": place, "index": index}
        return {"points": points, "peak": peak | self._peak(peak.get("index", -1))}

    def _peak(self, last: int) -> dict[str, Any]:
        sizes: dict[int, int] = {}
        for _, number, size, _, _ in self._events[: last + 1]:
            sizes[number] = size
        kinds, places = Counter[str](), Counter[str]()
        for number, size in sizes.items():
            storage = self._storages[number]
            kinds[storage.kind or TEMPORARIES] += size
            if storage.kind == ACTIVATIONS:
                places[storage.place or "outside the modules"] += size
        largest, of_kind = list[tuple[int, int]](), Counter[str]()
        for number, size in sorted(sizes.items(), key=lambda item: -item[1]):
            kind = self._storages[number].kind or TEMPORARIES
            of_kind[kind] += 1
            if len(largest) < LARGEST or of_kind[kind] <= LARGEST_OF_KIND:
                largest.append((number, size))
        tensors = [
            {
                "bytes": size,
                "kind": self._storages[number].kind or TEMPORARIES,
                "place": self._storages[number].place,
                "what": self._storages[number].what,
                "name": self._storages[number].name,
            }
            for number, size in largest
            if size
        ]
        return {"total": sum(kinds.values()), "kinds": +kinds, "places": +places, "largest": tensors}
