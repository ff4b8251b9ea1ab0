"""Step `machine`: what every later step needs."""

import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.accept.check import Check, Place, meshwright, within
from meshwright.accept.runs import device_of
from meshwright.devices import synchronize
from meshwright.machine import find_machine
from meshwright.spec.precision import BF16
from meshwright.trainer.peaks import datasheet_flops

SHARE = 0.6
"""Share of the datasheet's FLOP/s that a large product reaches at least: an H100's 600 of 989 TFLOP/s."""


def checks(place: Place) -> Iterator[Check]:
    """Programs, a product of 8192^3 in bf16, and a kernel that torch.compile generates."""
    yield meshwright("doctor").check("doctor")
    compiler = next(filter(shutil.which, ("gcc", "cc", "clang")), None)
    yield Check("a C compiler, which Triton needs", compiler is not None, compiler or "none")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield Check("Python.h, which Triton needs", header.is_file(), str(header))
    yield _product(place)
    x = torch.linspace(-3, 3, 4099, device=device_of(place))
    expected = torch.nn.functional.gelu(x) * x.sin()
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * x.sin())
    yield within("a generated kernel", (compiled(x) - expected).abs().max().item(), 1e-5)


def _product(place: Place) -> Check:
    device, size = device_of(place), 256 if not place.on_gpu else 8192
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    rate, machine = 2 * size**3 / best, find_machine(place.device)
    peak = datasheet_flops(machine.name, BF16) if place.on_gpu else None
    detail = f"{rate / 1e12:.4g} TFLOP/s in a product of {size}^3"
    if peak is None:
        return Check("speed of a product in bf16", None, detail, {"tflops": rate / 1e12})
    detail += f"; expected {SHARE:.0%} of the datasheet's {peak / 1e12:.0f}"
    return Check("speed of a product in bf16", rate >= SHARE * peak, detail, {"tflops": rate / 1e12})
