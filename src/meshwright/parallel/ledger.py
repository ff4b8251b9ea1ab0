"""The ledger: every tensor's memory from allocation to release, and FLOPs."""

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import flop_registry

from meshwright.torch_internals import (
    FLASH_CPU,
    FLASH_CPU_BACKWARD,
    DispatchMode,
    gathered_storages,
    in_backward_pass,
    leaves,
    local_tensor,
)

Storages = dict[int, str]
"""Identity of a storage -> its kind of memory."""

Group = list[torch.UntypedStorage]
"""The gathered weights of an FSDP2 module, which are freed together."""

STEP = 1.01
"""A new peak is examined in detail once it exceeds the last examined one by this factor."""

OTHER = "activations"
"""The kind of all other storages: saved activations, temporaries, communication buffers."""


def _flash_flops(q: torch.Tensor, k: torch.Tensor) -> int:
    """Two products of T x S x K per head; like torch's counter, without a discount for causality."""
    batch, heads, length, width = q.shape
    return 4 * batch * heads * length * k.shape[2] * width


CPU_FLOPS: dict[Any, Callable[..., int]] = {
    FLASH_CPU: lambda q, k, *_, **__: _flash_flops(q, k),
    FLASH_CPU_BACKWARD: lambda _, q, k, *__, **___: 5 * _flash_flops(q, k) // 2,
}
"""Operations missing in torch's FLOPs table: attention on a CPU, the device of fake tensors."""


class _Gathers:
    """The weights that FSDP2 gathers and frees, by module. It resizes their storages, which no mode sees."""

    def __init__(self, model: nn.Module | None) -> None:
        self._modules = [] if model is None else [each for each in model.modules() if isinstance(each, FSDPModule)]
        self.end()

    def begin(self) -> None:
        """Find the gathered weights again."""
        self._unknown: list[nn.Module] = list(self._modules)

    def end(self) -> None:
        """Keep no storage, else none would be released."""
        self._unknown, self._looking = [], False
        self._gathered: dict[int, Group] = {}
        self._freed: dict[int, Group] = {}

    def resized(self, gathering: bool) -> list[torch.UntypedStorage]:
        """The storages freed since the last operation; then, where FSDP2 is `gathering`, the enlarged ones."""
        self._looking |= gathering
        first = self._first_gathered() if self._looking and self._unknown else []
        freed = {key: group for key, group in self._gathered.items() if not group[0].nbytes()}
        grown = {key: group for key, group in self._freed.items() if group[-1].nbytes()} if gathering else {}
        for key in freed:
            self._freed[key] = self._gathered.pop(key)
        for key in grown:
            self._gathered[key] = self._freed.pop(key)
        return [storage for group in (*freed.values(), *first, *grown.values()) for storage in group]

    def _first_gathered(self) -> list[Group]:
        """The weights of modules that have been gathered for the first time."""
        groups = {id(module): gathered_storages(module) for module in self._unknown}
        gathered = {key: group for key, group in groups.items() if group}
        if gathered:
            self._unknown = [module for module in self._unknown if id(module) not in gathered]
            self._looking = False
            self._gathered |= gathered
        return list(gathered.values())


class Ledger(DispatchMode):
    """Tracks storages while it is entered.

    `name_storages` gives the kind of the storages of parameters, gradients, optimizer state and gathered weights; it is
    called at every new peak. Bytes are storage sizes, without an allocator's rounding.
    """

    def __init__(
        self, name_storages: Callable[[], Storages], elsewhere: Container[int] = (), model: nn.Module | None = None
    ) -> None:
        """`elsewhere`: identities of storages in other memory, which are not counted. `model`: the model whose weights
        FSDP2 gathers and frees, if any."""
        super().__init__()
        self.elsewhere = elsewhere
        self.name_storages = name_storages
        self.now = 0
        """Bytes allocated."""
        self.peak = 0
        """Most bytes allocated at once."""
        self.peak_by_kind: dict[str, int] = {}
        self.peak_phase = ""
        """The phase of the peak."""
        self.flops = 0
        self._bytes: dict[int, int] = {}
        self._seen_peak = 0
        self._gathers = _Gathers(model)

    def begin(self) -> None:
        """Reset peak and operations, but not the allocated bytes."""
        self.peak, self.flops, self._seen_peak = 0, 0, 0

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage())

    def __enter__(self) -> "Ledger":
        self._gathers.begin()
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        self._follow_gathers(True)
        self._gathers.end()
        super().__exit__(*arguments)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._follow_gathers(function.namespace == "fsdp")
        result = function(*args, **kwargs)
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                here = local_tensor(leaf)  # a DTensor's own storage is not allocated
                if self._watch(here.untyped_storage()):
                    self.made(here, function)
        packet = function.overloadpacket
        if packet in CPU_FLOPS:
            self.flops += CPU_FLOPS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        return result

    def made(self, tensor: torch.Tensor, operation: Any) -> None:
        """Called when an operation has allocated a tensor."""

    def changed(self, key: int, size: int) -> None:
        """Called when a storage has a new size; 0 when it is released."""

    def _watch(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage; returns whether it is new."""
        key = id(storage)  # torch keeps a storage's Python object as long as the storage
        if key in self._bytes or key in self.elsewhere or not self.counts(storage):
            return False
        self._bytes[key] = 0
        weakref.finalize(storage, _forget, weakref.ref(self), key)
        self._change(key, storage.nbytes())
        return True

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in the memory that is counted."""
        return True

    def _follow_gathers(self, gathering: bool) -> None:
        for storage in self._gathers.resized(gathering):
            self._watch(storage)
            size = storage.nbytes()
            if self._bytes.get(id(storage), size) != size:
                self._change(id(storage), size)

    def _change(self, key: int, size: int) -> None:
        self.now += size - self._bytes[key]
        self._bytes[key] = size
        self.changed(key, size)
        if self.now > self.peak:
            self.peak = self.now
            self.peak_phase = "backward pass" if in_backward_pass() else "forward pass or update"
            if self.peak > STEP * self._seen_peak:
                self._seen_peak = self.peak
                self.peak_by_kind = self.by_kind()

    def forget(self, key: int) -> None:
        """Stop counting a storage that was released."""
        self.now -= self._bytes.pop(key)
        self.changed(key, 0)

    def by_kind(self) -> dict[str, int]:
        """Bytes allocated now, by kind."""
        names = self.name_storages()
        kinds: Counter[str] = Counter()
        for key, size in self._bytes.items():
            kinds[names.get(key, OTHER)] += size
        return dict(kinds)


def _forget(ledger: "weakref.ref[Ledger]", key: int) -> None:
    """Called when a storage is released; the storage does not keep the ledger, whose functions know the model."""
    if (alive := ledger()) is not None:
        alive.forget(key)
