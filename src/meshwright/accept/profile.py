"""Step `profile`: what the host waits for, and how long the device is idle, in steady steps."""

from collections.abc import Iterator

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwright.accept.check import Check, Place
from meshwright.accept.runs import SMALL, device_of, run_of, steps_of
from meshwright.trainer.setup import RankContext, build_trainer

STEPS = 4
MOST_WAITS = 6
"""Waits of the host in a step of a dense model."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "hipLaunchKernel")


def checks(place: Place) -> Iterator[Check]:
    """Profile some steps after two others."""
    model, length = ({"name": "gpt2"}, 1024) if place.on_gpu else (SMALL, 64)
    training = {"global_batch": 8, "micro_batch": 8, "precision": "bf16"}
    trainer = build_trainer(run_of(model, training, length, device=place.device), RankContext(device=device_of(place)))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    steps = steps_of(trainer, 2 + STEPS)
    for _ in range(2):
        next(steps)
    with profile(activities=kinds) as profiler:
        seconds = [took for _, took in steps]
    counts: dict[str, int] = {}
    for event in profiler.events() or ():
        counts[event.name] = counts.get(event.name, 0) + 1
    waits = {name: counts[name] / STEPS for name in WAITS if name in counts}
    launches = sum(counts.get(name, 0) for name in LAUNCHES) / STEPS
    here = sum(waits.values()) - 1  # one is the measurement's own
    detail = f"{max(here, 0):g} a step, at most {MOST_WAITS}: {waits or 'none'}"
    yield Check("waits of the host", here <= MOST_WAITS if place.on_gpu else None, detail)
    kernels = [event for event in profiler.key_averages() if event.device_type != DeviceType.CPU]  # not their callers
    busy = sum(event.self_device_time_total for event in kernels if not event.is_user_annotation) / 1e6
    idle = 1 - busy / sum(seconds)
    figures = {"launches": launches, "idle": idle, "seconds": sum(seconds) / STEPS}
    detail = f"{launches:.0f} kernels a step; the device is idle for {idle:.1%} of {sum(seconds) / STEPS:.4g} s"
    yield Check("kernels and idle time, while profiled", None, detail if place.on_gpu else "no device", figures)
    table = profiler.key_averages().table(
        sort_by="self_device_time_total" if place.on_gpu else "self_cpu_time_total", row_limit=25
    )
    (place.work / "profile.txt").write_text(table)
