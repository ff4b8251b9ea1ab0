"""Step `predictions`: the planner beside what this machine does."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.accept.check import Check, Place, within
from meshwright.accept.runs import SMALL, device_of, run_of, train_here
from meshwright.machine import find_machine
from meshwright.predict.forecast import forecast
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.calibrate import calibrate

STEPS = 4
MEDIAN, WORST = 0.05, 0.10
"""Relative errors of memory that pass: the median, and the largest."""
SECONDS = 0.15
"""Median relative error of a step's seconds that passes, after the calibration."""

Case = tuple[str, dict[str, Any], int, dict[str, Any], dict[str, Any]]
"""Name, model, length, training, layout."""


def cases(*, on_gpu: bool) -> Iterator[Case]:
    """Sizes, recomputation, formats and offloading."""
    if not on_gpu:
        yield "small", SMALL, 128, {"global_batch": 8, "micro_batch": 4}, {}
        return
    gpt2, llama = {"name": "gpt2"}, {"name": "llama-3.2-1b"}
    for rows in (8, 32):
        yield f"gpt2 of 124M, {rows} rows", gpt2, 1024, {"micro_batch": rows}, {}
    for policy in ("none", "selective", "full"):
        yield f"llama of 1.2B, recompute {policy}", llama, 2048, {"micro_batch": 2, "recompute": policy}, {}
    selective = {"micro_batch": 2, "recompute": "selective"}
    yield "llama of 1.2B, bf16 weights", llama, 2048, {**selective, "master_dtype": "bf16"}, {}
    yield "llama of 1.2B, adamw_8bit", llama, 2048, {**selective, "optimizer": {"name": "adamw_8bit"}}, {}
    yield "llama of 1.2B, fp8", llama, 2048, {**selective, "precision": "fp8"}, {}
    yield "llama of 1.2B, optimizer in host memory", llama, 2048, selective, {"offload": {"optimizer": "host"}}
    yield (
        "llama of 1.2B, activations in host memory",
        llama,
        2048,
        {"micro_batch": 2},
        {"offload": {"activations": "host"}},
    )


def checks(place: Place) -> Iterator[Check]:
    """Calibrate, then measure and predict each case."""
    machine, device = find_machine(place.device), device_of(place)
    cluster = calibrate(machine, ranks=1, seconds=0.3)
    yield Check("calibration", None, cluster.model_dump_json(exclude_defaults=True), cluster.model_dump(mode="json"))
    memory, seconds = list[float](), list[float]()
    for name, model, length, training, layout in cases(on_gpu=place.on_gpu):
        batch = training["micro_batch"]
        training = {"precision": "bf16", "global_batch": batch, **training}
        resolved = run_of(model, training, length, layout=layout, device=place.device)
        measured = train_here(resolved, device, STEPS)
        predicted = forecast(_on(resolved, cluster, place.work), machine)
        need = predicted.memory.total
        seconds.append(abs(predicted.time.total / measured.seconds - 1))
        figures = {"seconds": measured.seconds, "predicted seconds": predicted.time.total, "bytes": measured.reserved}
        figures["predicted bytes"] = need
        detail = f"{measured.seconds:.4g} s a step, predicted {predicted.time.total:.4g}"
        if place.on_gpu:
            memory.append(abs(need / measured.reserved - 1))
            detail += f"; {measured.reserved / 2**30:.2f} GiB, predicted {need / 2**30:.2f}"
        yield Check(name, None, detail, figures)
    yield within(
        "seconds, median error", statistics.median(seconds), math.inf if not place.on_gpu else SECONDS, "relative error"
    )
    if memory:
        yield within("memory, median error", statistics.median(memory), MEDIAN, "relative error")
        yield within("memory, largest error", max(memory), WORST, "relative error")


def _on(resolved: ResolvedRun, cluster: ClusterSpec, work: Path) -> ResolvedRun:
    """The run on the calibrated cluster."""
    file = work / "machine.yaml"
    file.write_text(cluster.model_dump_json())
    return resolved.model_copy(update={"run": resolved.run.model_copy(update={"cluster": str(file)})})
