"""Calibration: measurements of a machine for the planner."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.comm import collectives
from meshwright.devices import CPU, accelerator, backend_of, of_kind, on_cpu, synchronize
from meshwright.machine import Machine, find_machine
from meshwright.models.dtypes import torch_dtype
from meshwright.predict.hardware import local_cluster
from meshwright.spec.cluster import ClusterSpec, CollectiveCost, Measured
from meshwright.spec.precision import BF16, FP32
from meshwright.storage.scratch import scratch_folder

LARGE = {"cpu": 1024, "gpu": 8192}
SMALL = {"cpu": 64, "gpu": 256}
"""Sides of the square products that measure a device's rate and the fixed cost of a product."""
COPY_BYTES = {"cpu": 2**27, "gpu": 2**30}
MESSAGE_BYTES = {"cpu": (2**12, 2**22, 2**25), "gpu": (2**12, 2**24, 2**28)}
"""Payloads of the all-reduces, from the smallest, which measures latency, to the largest."""
MEASURED = (FP32, BF16)
TINY_OPERATORS = 200
MANY = 20
"""Small products between two synchronisations, each of which costs as much as a product."""


def calibrate(machine: Machine | None = None, *, ranks: int | None = None, seconds: float = 1.0) -> ClusterSpec:
    """The cluster `local` with rates measured while all `ranks` (default: one per device) work at once.

    Each of about ten measurements takes `seconds`. Starts its own processes.
    """
    machine = machine or find_machine()
    ranks = ranks or machine.devices
    cluster = local_cluster(machine, ranks)
    context = multiprocessing.get_context("spawn")
    with scratch_folder("calibrate") as folder, context.Pool(ranks) as pool:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        store = f"file://{folder / 'store'}"
        jobs = [(rank, ranks, machine.is_gpu, threads, store, seconds) for rank in range(ranks)]
        by_rank = pool.map(_measure_rank, jobs, chunksize=1)
    slowest = {name: _slowest(name, [measured[name] for measured in by_rank]) for name in by_rank[0]}
    measured = Measured(
        matmul_tflops={dtype.name: slowest[f"matmul {dtype}"] for dtype in MEASURED},
        matmul_half_us={dtype.name: slowest[f"start {dtype}"] for dtype in MEASURED},
        memory_gb_s=slowest["memory"],
        attention_tflops=slowest["attention"],
        host_us=slowest["host"],
        collectives={"link": _collective(slowest, MESSAGE_BYTES["gpu" if machine.is_gpu else "cpu"], ranks)}
        if ranks > 1
        else {},
    )
    source = f"measured on {socket.gethostname()} with {ranks} simultaneous ranks, torch {torch.__version__}"
    return cluster.model_copy(update={"measured": measured, "source": source})


def _measure_rank(job: tuple[int, int, bool, int, str, float]) -> dict[str, float]:
    """The measurements of one rank, while all others measure the same."""
    rank, ranks, on_gpu, threads, store, seconds = job
    torch.set_num_threads(threads)
    device = accelerator(rank) if on_gpu else CPU
    rates: dict[str, float] = {}
    dist.init_process_group(backend_of([device.type]), init_method=store, rank=rank, world_size=ranks)
    dist.barrier()
    for measured in MEASURED:
        dtype = torch_dtype(measured)
        large, small = of_kind(LARGE, device), of_kind(SMALL, device)
        took = _seconds(_product(large, dtype, device), seconds, device)
        rates[f"matmul {measured}"] = 2 * large**3 / took / 1e12
        rates[f"start {measured}"] = max(0.0, _seconds(_product(small, dtype, device, MANY), seconds / 4, device) / MANY
                                     - 2 * small**3 / (2 * large**3 / took)) * 1e6  # fmt: skip
    source = torch.ones(of_kind(COPY_BYTES, device) // 4, device=device)
    target = torch.empty_like(source)
    rates["memory"] = 2 * of_kind(COPY_BYTES, device) / _seconds(lambda: target.copy_(source), seconds, device) / 1e9
    rates["attention"] = _attention_tflops(device, seconds)
    tiny = torch.ones(1, device=device)
    many = _seconds(lambda: [tiny.add_(1) for _ in range(TINY_OPERATORS)], seconds, device)
    rates["host"] = many / TINY_OPERATORS * 1e6
    if ranks > 1:
        for size in of_kind(MESSAGE_BYTES, device):
            payload = torch.ones(size // 4, device=device)
            rates[f"reduce {size}"] = _times(lambda p=payload: collectives.all_reduce_(p), 7, device)
    dist.barrier()
    dist.destroy_process_group()
    return rates


def _product(side: int, dtype: torch.dtype, device: torch.device, times: int = 1) -> Callable[[], Any]:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: [torch.mm(left, right, out=out) for _ in range(times)]


def _attention_tflops(device: torch.device, seconds: float) -> float:
    """TFLOP/s of causal attention, forward and backward, counting only unmasked products."""
    heads, length, width = (8, 512, 64) if on_cpu(device) else (32, 4096, 128)
    dtype = torch.float32 if on_cpu(device) else torch.bfloat16
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = torch.ones(1, heads, length, width, device=device, dtype=dtype)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(weights)

    return 3.5 * 4 * heads * length**2 * width / 2 / _seconds(both, seconds, device) / 1e12


def _seconds(action: Callable[[], Any], budget: float, device: torch.device) -> float:
    """Median seconds of an action, repeated for about `budget` seconds. An action that takes longer than `budget` is
    measured once, after a warm-up: without bf16 units a product takes seconds."""
    action()
    first = max(_times(action, 1, device), 1e-7)
    return first if first > budget else _times(action, max(3, min(200, int(budget / first))), device)


def _times(action: Callable[[], Any], repeats: int, device: torch.device) -> float:
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        synchronize(device)
        took.append(time.perf_counter() - start)
    return median(took)


def _slowest(name: str, values: list[float]) -> float:
    """The value of the slowest rank, because the others wait for it."""
    return min(values) if name.split()[0] in ("matmul", "memory", "attention") else max(values)


def _collective(slowest: dict[str, float], sizes: tuple[int, ...], ranks: int) -> CollectiveCost:
    """Latency of one round and bandwidth of a ring, from the smallest and the largest all-reduce."""
    latency, longest = slowest[f"reduce {sizes[0]}"], slowest[f"reduce {sizes[-1]}"]
    wire = 2 * sizes[-1] * (ranks - 1) / ranks
    return CollectiveCost(latency_us=latency / 2 * 1e6, bandwidth_gb_s=wire / max(longest - latency, 1e-9) / 1e9)
