"""Devices: the only file that names one. CPUs, and whatever `torch.accelerator` stands for: NVIDIA's and AMD's GPUs.

Elsewhere a device is a `torch.device`, or one of the recipe's words (`device`). What a device does differently is
asked here: `on_cpu`, streams, pinned memory, seeds, memory counters, synchronisation, the backend of its collectives.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

CPU = torch.device("cpu")
BACKENDS = {"cuda": "nccl"}
"""Type of an accelerator -> torch's backend of its collectives."""

T = TypeVar("T")


def on_cpu(device: torch.device | torch.Tensor) -> bool:
    """Whether a device, or a tensor's, is the CPU, or `meta`, which computes as the CPU does."""
    kind = device.device.type if isinstance(device, torch.Tensor) else device.type
    return kind in ("cpu", "meta")


def of_kind(choices: Mapping[str, T], device: torch.device | torch.Tensor) -> T:
    """The entry `cpu` or `gpu` of `choices`."""
    return choices["cpu" if on_cpu(device) else "gpu"]


def accelerator_is_here() -> bool:
    """Whether torch can use an accelerator."""
    return torch.accelerator.is_available()


def built_for() -> str:
    """The toolkit of an accelerator that torch was built for, as `CUDA 12.8`."""
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


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
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def name_of(device: torch.device) -> str:
    """The product's name; `cpu` for a CPU."""
    return "cpu" if on_cpu(device) else torch.get_device_module(device).get_device_name(device)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The generation of an accelerator's kernels, as (9, 0); (0, 0) if it has none."""
    return (0, 0) if on_cpu(device) else torch.get_device_module(device).get_device_capability(device)


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
    return torch.accelerator.memory_reserved(device)


def peak_reserved_bytes(device: torch.device) -> int:
    """The most memory that torch has reserved on an accelerator."""
    return torch.accelerator.max_memory_reserved(device)


def reset_peak(device: torch.device) -> None:
    """Begin to measure `peak_reserved_bytes` anew; nothing on a CPU."""
    if not on_cpu(device):
        torch.accelerator.reset_peak_memory_stats(device)


def release_unused() -> None:
    """Return memory that torch has reserved and not used to the accelerator; nothing without one in use."""
    if accelerator_is_here() and torch.get_device_module().is_initialized():
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


def backend_of(devices: Sequence[str]) -> str:
    """The backends of a process group, for tensors on devices of these types: gloo for the host's, always."""
    if not any(kind in BACKENDS for kind in devices):
        return "gloo"
    return ",".join(["cpu:gloo", *(f"{kind}:{BACKENDS[kind]}" for kind in devices if kind in BACKENDS)])
