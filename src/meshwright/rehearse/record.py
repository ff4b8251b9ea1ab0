"""The record of what a rank sends, for `rehearse.nccl`: every collective and message, with the line that made it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm import collectives
from meshwright.parallel import Meshes
from meshwright.parallel.traffic import KINDS, ranks_of
from meshwright.rehearse.nccl import RankEvent, RankRecord, Size
from meshwright.spec.errors import UserError
from meshwright.torch_internals import DispatchMode, leaves, process_group_of

PACKAGE = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).resolve().parent

MORE_KINDS = {"reduce_": "reduce", "gather_": "gather", "scatter_": "scatter", "barrier": "barrier"}
"""As `KINDS`, of operations that carry no training tensors."""
HOST = "comm/objects.py"
"""Sends what is the host's; everything else is taken to be on the device."""
BETWEEN = ("torch_internals.py", "comm/collectives.py", HOST, "rehearse/", "testing/")
"""Files whose callers are the places that matter."""

WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py")


@contextmanager
def record(meshes: Meshes | None) -> Iterator["Recorder"]:
    """Records what this rank does while the context lasts."""
    recorder = Recorder(meshes)
    token = collectives.WAITS.set(recorder.waits)
    try:
        with recorder:
            yield recorder
    finally:
        collectives.WAITS.reset(token)


class Recorder(DispatchMode):
    """Listens at torch's dispatcher."""

    def __init__(self, meshes: Meshes | None) -> None:
        super().__init__()
        self.record = RankRecord([], {})
        groups = list(named_groups(meshes))
        self._names = {group.group_name: name for name, group in groups[::-1]}  # the first name of several
        self._names_of_ranks = {ranks_of(group): name for name, group in groups[::-1]}
        """For groups of an equal mesh from before, which DTensor keeps in a cache."""
        self._batch: FrameType | None = None
        self._number = -1
        self._messages: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and (kind := (KINDS | MORE_KINDS).get(name)):
            group = process_group_of(function, args, kwargs or {}) or dist.group.WORLD
            assert group is not None
            named = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
            self._note(kind, group, named)
        return function(*args, **(kwargs or {}))

    def synchronize(self) -> None:
        """The host waits for everything that it has queued, as `devices.synchronize` does on a GPU."""
        self.record.events.append(RankEvent("synchronize", caller().place))

    def waits(self, tensor: torch.Tensor) -> None:
        """A message of this tensor is waited for."""
        number = self._messages.get(id(tensor.untyped_storage()))
        if number is not None:
            self.record.events.append(RankEvent("wait", caller().place, of=number))

    def _note(self, kind: str, group: Any, named: dict[str, Any]) -> None:
        here, members = caller(), ranks_of(group)
        name = self._names.get(group.group_name) or self._names_of_ranks.get(members)
        if name is None:
            raise UserError(
                f"{here.place}: sends in a process group that is not the layout's; only those can be recorded"
            )
        self.record.groups[name] = members
        tensors = [leaf for leaf in leaves(list(named.values())) if isinstance(leaf, torch.Tensor)]
        tensor = tensors[-1 if kind == "gather" else 0]
        size = (str(tensor.dtype), tensor.numel())
        if kind in ("send", "receive"):
            peer = named["dst" if kind == "send" else "src"] - members.index(dist.get_rank())
            self._message((kind, peer % len(members), size), name, here, tensor)
            return
        if "root_rank" in named:
            kind = f"{kind} with root {named['root_rank']}"
        event = RankEvent(kind, here.place, name, size, host=here.on_host)
        received, sent = named.get("output_split_sizes"), named.get("input_split_sizes")
        if received and sent:
            event.rows, event.size = (list(received), list(sent)), (size[0], 0)
        self.record.events.append(event)

    def _message(self, message: tuple[str, int, Size], group: str, here: "Caller", tensor: torch.Tensor) -> None:
        events = self.record.events
        if here.batch is None or here.batch is not self._batch:
            self._batch = here.batch
            events.append(RankEvent(message[0] if here.batch is None else "batch", here.place, group))
            self._number = len(events) - 1
        events[self._number].peers.append(message)
        self._messages[id(tensor.untyped_storage())] = self._number
        if not here.waits_later:
            events.append(RankEvent("wait", here.place, of=self._number))


class Caller(NamedTuple):
    """The code that sends something."""

    place: str
    """`file:line`, outside torch and the functions that everything is sent with; files of this package by their paths
    there."""
    on_host: bool
    """Whether what it sends is the host's."""
    batch: FrameType | None
    """The call that sends it in a batch."""
    waits_later: bool
    """Whether `Recorder.waits` is called with its wait."""


def caller() -> Caller:
    """What the stack says about an operation."""
    frame, batch, passed = inspect.currentframe(), None, set[str]()
    while frame is not None:
        name = _file_of(frame.f_code.co_filename)
        batch = frame if frame.f_code.co_name == "batch_isend_irecv" else batch
        if name.startswith(BETWEEN):
            passed.add(name)
        elif name:
            return Caller(f"{name}:{frame.f_lineno}", HOST in passed, batch, "comm/collectives.py" in passed)
        frame = frame.f_back
    raise AssertionError("an operation without a caller")


@cache
def _file_of(name: str) -> str:
    """A source file: by its path in this package, by its whole path, or nothing if it is torch's or only wraps."""
    file = Path(name)
    if file.is_relative_to(TORCH) or file.name in WRAPPERS:
        return ""
    return file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else name


def named_groups(meshes: Meshes | None) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The process groups of this rank, with the names of their axes.

    Several may have the same ranks, because slices of meshes make their own.
    """
    if dist.group.WORLD is not None:
        yield "world", dist.group.WORLD
    for name, view, axis in _axes(meshes):
        yield name, view.get_group(axis)


def group_ranks(meshes: Meshes | None, world_size: int) -> dict[str, list[list[int]]]:
    """The same names -> the ranks of each such group in the whole job."""
    ranks = {"world": [list(range(world_size))]}
    for name, view, axis in _axes(meshes):
        ranks[name] = view.mesh.movedim(axis, -1).reshape(-1, view.size(axis)).tolist()
    return ranks


def _axes(meshes: Meshes | None) -> Iterator[tuple[str, DeviceMesh, int]]:
    """Each axis of each view; the experts' own are called `expert replicate` and so on."""
    for view in meshes.views() if meshes else ():
        prefix = "expert " if meshes is not None and view is meshes.experts else ""
        for axis, name in enumerate(view.mesh_dim_names or ()):
            yield prefix + name, view, axis
