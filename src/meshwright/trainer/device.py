"""The device of a rank: which one, its speed, its memory in use."""

import ctypes
import functools
import gc
import platform
import resource
import sys
import time

import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.devices import (
    CPU,
    accelerator,
    accelerator_is_here,
    device_count,
    identity_of,
    of_kind,
    on_cpu,
    peak_reserved_bytes,
    release_unused,
    synchronize,
)
from meshwright.launch.launcher import make_cublas_deterministic
from meshwright.machine import Machine
from meshwright.models.cpu_kernels import matmul
from meshwright.models.dtypes import torch_dtype
from meshwright.spec.errors import UserError
from meshwright.spec.precision import Precision
from meshwright.trainer.peaks import datasheet_flops

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SIZES = {"cpu": (256, 512, 1024), "gpu": (1024, 2048, 4096, 8192)}
"""Sides of the square products; a small one on a GPU is mostly the time to start it."""
PRODUCT_SECONDS = 0.1
"""Duration of the matrix products that measure a device's speed."""


def choose_device(machine: Machine, local_rank: int) -> torch.device:
    """The device of the local rank; raises `UserError` if torch cannot use the machine's GPU."""
    if machine.kind == "cpu":
        return CPU
    if not accelerator_is_here():
        raise UserError(
            f"this machine has a {machine.name}, but torch {torch.__version__} cannot use it; install a CUDA build "
            "of torch, or set device=cpu"
        )
    seen = device_count()
    # A scheduler may show each process its own GPU alone (srun --gpus-per-task=1); `check_own_gpu` finds a shared one.
    number = local_rank % seen if machine.shared or seen == 1 else local_rank
    if number >= seen:
        raise UserError(
            f"local rank {local_rank} has no GPU: torch sees {seen} here; use fewer ranks, or try the layout with "
            "device=cuda_shared"
        )
    return accelerator(number)


def check_own_gpu(device: torch.device) -> None:
    """Raise `UserError` on all ranks if two ranks have one GPU, with which NCCL would fail. Collective."""
    if on_cpu(device):
        return
    everyone = gather_everywhere((platform.node(), identity_of(device)))
    for rank, place in enumerate(everyone):
        first = everyone.index(place)
        if first != rank:
            raise UserError(
                f"ranks {first} and {rank} have the same GPU of {place[0]}; start as many processes as GPUs, or give "
                "each its own (srun --gpus-per-task=1)"
            )


def peak_flops(device: torch.device, machine: Machine, precision: Precision) -> tuple[float, str]:
    """The FLOP/s that MFU is measured against, and the origin of the figure."""
    known = datasheet_flops(machine.name, precision.compute) if not on_cpu(device) else None
    if known is not None:
        return known, f"datasheet, {machine.name}, dense {precision.compute}"
    measured, size = _measured_matmul_flops(device, torch_dtype(precision.compute), torch.get_num_threads())
    return measured, f"measured here, {size}^3 {precision.compute} product"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: reserved GPU memory, or the resident set on a CPU."""
    if not on_cpu(device):
        return peak_reserved_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Make the C library keep freed memory; affects every later malloc of this process.

    By default glibc returns large blocks to the system at once, and the next step pays for clearing their pages again:
    a third of a step with a large vocabulary. Keeping them does not change the peak. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option in M_TRIM_THRESHOLD, M_MMAP_THRESHOLD:
            mallopt(option, 2**31 - 1)


def free_all() -> None:
    """Return unused memory to the device and the system."""
    gc.collect()
    release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels only; it raises if an operation has none.

    Call it before the first matrix product: cuBLAS reads its setting when it starts.
    """
    make_cublas_deterministic()
    torch.use_deterministic_algorithms(True)


@functools.cache
def _measured_matmul_flops(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, int]:
    """FLOP/s of the best of a few square matrix products, and their size: the largest for which one product takes no
    longer than `PRODUCT_SECONDS`. Without kernels for a dtype, as for fp16 on most CPUs, a large product takes seconds.

    Measured once per process for each number of computing `threads`.
    """
    size, *sizes = of_kind(SIZES, device)
    seconds = _seconds_of_product(device, dtype, size)
    for larger in sizes:
        if seconds * (larger / size) ** 3 > PRODUCT_SECONDS:
            break
        size, seconds = larger, _seconds_of_product(device, dtype, larger)
    return 2 * size**3 / seconds, size


def _seconds_of_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        matmul(a, a)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
