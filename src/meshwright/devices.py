"""Devices: the only file that names one. CPUs, and whatever `torch.accelerator` stands for: NVIDIA's and AMD's GPUs
(`cuda`), Intel's (`xpu`), Apple's (`mps`).

Elsewhere a device is a `torch.device`, or one of the recipe's words (`device`). What a device does differently is
asked here: `on_cpu`, streams, pinned memory, seeds, memory counters, synchronisation, the backend of its collectives.
"""

import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch

CPU = torch.device("cpu")


class Accelerator(NamedTuple):
    """What torch has for a type of accelerators."""

    backend: str | None
    """torch's backend of its collectives; None: one process only."""
    streams: bool = True
    """Whether copies run beside its computation, from and to pinned memory."""
    fp64: bool = True
    """Whether it computes in fp64."""


ACCELERATORS = {
    "cuda": Accelerator("nccl"),
    "xpu": Accelerator("xccl"),
    "mps": Accelerator(None, streams=False, fp64=False),
}
"""By torch's name of the type. On `xpu` and `mps` no line of this project has run."""

ALIGNED = 64
"""Alignment of tensors in a block, in bytes."""

T = TypeVar("T")


def on_cpu(device: torch.device | torch.Tensor) -> bool:
    """Whether a device, or a tensor's, is the CPU, or `meta`, which computes as the CPU does."""
    kind = device.device.type if isinstance(device, torch.Tensor) else device.type
    return kind in ("cpu", "meta")


def of_kind(choices: Mapping[str, T], device: torch.device | torch.Tensor) -> T:
    """The entry `cpu` or `gpu` of `choices`."""
    return choices["cpu" if on_cpu(device) else "gpu"]


def widest(device: torch.device | torch.Tensor) -> torch.dtype:
    """The dtype of sums and probabilities on a device: fp64, or fp32 where it has none."""
    kind = device.device.type if isinstance(device, torch.Tensor) else device.type
    return torch.float64 if kind not in ACCELERATORS or ACCELERATORS[kind].fp64 else torch.float32


def has_streams(device: torch.device) -> bool:
    """Whether copies run beside the device's computation, from and to pinned memory."""
    return device.type in ACCELERATORS and ACCELERATORS[device.type].streams


def accelerator_is_here() -> bool:
    """Whether torch can use an accelerator."""
    return torch.accelerator.is_available()


def built_for() -> str:
    """The toolkit of an accelerator that torch was built for, as `CUDA 12.8`."""
    toolkits = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda, "XPU": torch.version.xpu}
    return next((f"{name} {version}" for name, version in toolkits.items() if version), "Metal")


def device_count() -> int:
    """Number of accelerators that torch sees."""
    return torch.accelerator.device_count()


def accelerator(number: int) -> torch.device:
    """One of this machine's accelerators; from now on this process computes on it."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    torch.accelerator.set_device_index(number)
    return torch.device(kind.type, number)


def with_my_device(work: Callable[..., None]) -> Callable[..., None]:
    """`work` for another thread, on this thread's accelerator.

    A thread begins with accelerator 0, where its first use, such as the synchronisation that torch's checkpoints make,
    allocates a context of half a gigabyte.
    """
    if not accelerator_is_here():
        return work
    number = torch.accelerator.current_device_index()

    def run(*args: Any) -> None:
        torch.accelerator.set_device_index(number)
        work(*args)

    return run


def identity_of(device: torch.device) -> str:
    """What distinguishes an accelerator from all others of its machine, whatever each process sees."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(device) if properties is None else str(properties(device).uuid)


def name_of(device: torch.device) -> str:
    """The product's name; the type if torch does not know it."""
    name = None if on_cpu(device) else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else name(device)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The generation of an NVIDIA GPU's kernels, as (9, 0); (0, 0) of others, whose fp8 is another."""
    if device.type != "cuda" or torch.version.hip:
        return (0, 0)
    return torch.get_device_module(device).get_device_capability(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if not on_cpu(device):
        torch.accelerator.synchronize(device)


def synchronize_all(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for every device that has one of these tensors."""
    for device in {tensor.device for tensor in tensors}:
        synchronize(device)


def reserved_bytes(device: torch.device) -> int:
    """Memory that torch has reserved on an accelerator."""
    of_driver = getattr(torch.get_device_module(device), "driver_allocated_memory", None)
    return torch.accelerator.memory_reserved(device) if of_driver is None else of_driver()


def peak_reserved_bytes(device: torch.device) -> int:
    """The most memory that torch has reserved on an accelerator; what it has reserved now where no peak is kept."""
    return max(torch.accelerator.max_memory_reserved(device), reserved_bytes(device))


def reset_peak(device: torch.device) -> None:
    """Begin to measure `peak_reserved_bytes` anew; nothing on a CPU."""
    if has_streams(device):
        torch.accelerator.reset_peak_memory_stats(device)


def release_unused() -> None:
    """Return memory that torch has reserved and not used to the accelerator; nothing without one in use."""
    in_use = getattr(torch.get_device_module(), "is_initialized", None)
    if accelerator_is_here() and (in_use is None or in_use()):
        torch.accelerator.empty_cache()


def random_state_of(device: torch.device) -> torch.Tensor:
    """The state of the device's generator: uint8."""
    return torch.get_rng_state() if on_cpu(device) else torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Give the device's generator a state."""
    if on_cpu(device):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@functools.cache
def side_stream(device: torch.device) -> torch.Stream:
    """A stream of an accelerator for copies beside its computation."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream to which this thread's work on an accelerator goes."""
    return torch.accelerator.current_stream(device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """Inside the context, work goes to this stream."""
    return stream


def after(device: torch.device) -> Callable[[], object]:
    """A function that any thread may call to wait until the device has done what is queued now."""
    if not has_streams(device):
        synchronize(device)
        return lambda: None
    return current_stream(device).record_event().synchronize


# ---- memory of the host that an accelerator reads and writes ---------------------------------------------------------


class _Registered(mmap.mmap):
    """Memory that an accelerator's driver knows as long as it lives."""

    address, runtime = 0, None

    def __del__(self) -> None:
        if self.runtime is not None:
            self.runtime.cudaHostUnregister(self.address)


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """A byte buffer in host memory, zeros, from a page's start, from and to which `device` copies at once (pinned).

    torch's own pinned blocks have a power of two of bytes: one byte more than 16 MiB would take 32.
    """
    size = max(1, size)
    runtime = getattr(torch.get_device_module(device), "cudart", None) if has_streams(device) else None
    if runtime is None:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=has_streams(device))
    block = _Registered(-1, size)
    buffer = torch.frombuffer(block, dtype=torch.uint8)
    torch.get_device_module(device).check_error(int(runtime().cudaHostRegister(buffer.data_ptr(), size, 0)))
    block.address, block.runtime = buffer.data_ptr(), runtime()
    return buffer


def host_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Host memory for copies of tensors by name; that of an accelerator's tensors is pinned, in one block."""
    rooms = {name: torch.empty_like(tensor) for name, tensor in tensors.items() if on_cpu(tensor)}
    there = {name: tensor for name, tensor in tensors.items() if name not in rooms}
    if there:
        ends = list(itertools.accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in there.values()))
        block = host_bytes(ends[-1], next(iter(there.values())).device)
        for (name, tensor), start in zip(there.items(), [0, *ends], strict=False):
            rooms[name] = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return rooms


class HostRooms:
    """Host memory for copies that one stream of a device makes and reads: rooms of the sizes that were given back are
    taken again. The stream's order keeps a room's last copy before its next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for a copy of a tensor."""
        free = self._free.get(tensor.nbytes)
        room = free.pop() if free else host_bytes(tensor.nbytes, self._device)
        return room.view(tensor.dtype).as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def give_back(self, room: torch.Tensor) -> None:
        """A room that nobody reads any more."""
        whole = torch.empty(0, dtype=torch.uint8).set_(room.untyped_storage())
        self._free.setdefault(len(whole), []).append(whole)


@functools.cache
def host_rooms(device: torch.device) -> HostRooms:
    """Those of the copies that the device's side stream makes."""
    return HostRooms(device)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host's tensor on a device; an accelerator's copy blocks nobody."""
    if not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def backend_of(devices: Sequence[str]) -> str:
    """The backends of a process group, for tensors on devices of these types: gloo for the host's, always."""
    backends = {kind: ACCELERATORS[kind].backend for kind in devices if kind in ACCELERATORS}
    several = [f"{kind}:{name}" for kind, name in backends.items() if name]
    return ",".join(["cpu:gloo", *several]) if several else "gloo"
